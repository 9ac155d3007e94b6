"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.generation import served_model
from moed.server.api.state import AppState


def models_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The model under each of its names."""
        cards = [model_card(name, state) for name in state.config.model.served_model_names]
        return _json({"object": "list", "data": cards})

    # Ids of Hub models hold a slash.
    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str, request: Request) -> Response:
        return _json(model_card(served_model(model_id, state), state))

    return router


def model_card(name: str, state: AppState) -> dict[str, Any]:
    config = state.config
    return {
        "id": name,
        "object": "model",
        "created": state.created_at,
        "owned_by": "moed",
        "root": config.model.model,
        "parent": None,
        "max_model_len": state.context_length,
        "moed": {
            "architecture": config.model.architecture,
            "dtype": config.model.dtype,
            "num_experts": config.model.num_experts,
            "top_k": config.model.top_k,
            "data_parallel_size": config.parallel.data_parallel_size,
            "expert_parallel_size": config.parallel.expert_parallel_size,
            "all2all_backend": config.parallel.backend.name,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        },
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
