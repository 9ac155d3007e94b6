"""`GET /v1/moe/experts`: how busy each expert is, by layer, and where it lies."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.state import AppState


def experts_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["moe"])

    @router.get("/v1/moe/experts")
    async def expert_load(request: Request) -> Response:
        """(token, choice) pairs by MoE layer and expert, since the start and over the last minute,
        with the placement that `moed place` starts from.
        """
        content = msgspec.json.encode(experts_json(state))
        return Response(content, media_type="application/json")

    return router


def experts_json(state: AppState) -> dict[str, Any]:
    """`layers` is empty before the first step of a request."""
    config, loads = state.config, state.metrics.expert_loads
    return {
        "object": "moe.experts",
        "model": config.model.served_model_names[0],
        "num_experts": config.model.num_experts,
        "top_k": config.model.top_k,
        "num_ranks": config.parallel.world_size,
        "window_s": round(loads.window_s, 3),
        "layers": [
            {
                "layer": load.layer,
                "rows": load.rows,
                "window_rows": load.window_rows,
                "window_rank_rows": load.window_rank_rows,
                "imbalance": round(load.imbalance, 4),
                "experts_by_rank": config.placement(load.layer).held,
            }
            for load in loads.layers()
        ],
    }
