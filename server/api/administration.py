"""What governs the daemon, and what tells how it was set up: behind the admin key."""

import dataclasses
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.errors import Conflict
from moed.server.api.json_route import JsonRoute
from moed.server.api.parameters import Defaults
from moed.server.api.state import AppState

MAX_WAIT_S = 3600
WaitSeconds = Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)]


def administration_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["administration"], route_class=JsonRoute)

    @router.post("/admin/drain")
    async def drain(request: Request, wait_s: WaitSeconds = 0.0) -> Response:
        """Take no new requests until told to resume, and let open ones finish; the answer comes
        once they have, or after `wait_s`.
        """
        if not state.health.hold():
            raise Conflict(f"a drain makes no sense now: {state.health.reason}")
        if wait_s:
            await state.open_requests.wait_empty(wait_s)
        return _json(phase_json(state))

    @router.post("/admin/resume")
    async def resume(request: Request) -> Response:
        """Take new requests again, after a drain."""
        if not state.health.release():
            raise Conflict(f"requests cannot be taken again: {state.health.reason}")
        return _json(phase_json(state))

    @router.get("/server_info")
    async def server_info(request: Request) -> Response:
        """Every setting as it was resolved, with where its value came from. No secrets."""
        return _json(server_info_json(state))

    return router


def phase_json(state: AppState) -> dict[str, Any]:
    return {
        "status": state.health.phase.value,
        "reason": state.health.reason or None,
        "num_open_requests": state.open_requests.num_open,
    }


def server_info_json(state: AppState) -> dict[str, Any]:
    config, engine = state.config, state.engine
    return {
        "version": state.version,
        "system_fingerprint": state.system_fingerprint,
        **phase_json(state),
        "model": config.model.served_model_names[0],
        "context_length": engine.context_length or None,
        "num_kv_blocks_per_rank": engine.num_kv_blocks or None,
        "sampling_defaults": dataclasses.asdict(Defaults.of(config)),
        "settings": {
            entry.name: {"value": entry.value, "origin": entry.origin} for entry in config.explained
        },
        "ranks": state.health.report()["ranks"],
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
