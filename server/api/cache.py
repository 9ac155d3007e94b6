"""`POST /reset_prefix_cache`."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.state import AppState


def cache_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["cache"])

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Have every rank compute the prompts of all requests from now on in full, once."""
        state.engine.forget_prefixes()
        return Response(b"{}", media_type="application/json")

    return router
