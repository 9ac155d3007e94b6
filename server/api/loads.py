"""`GET /v1/loads`: how busy each DP rank is, for routers that stand before several daemons; in the
shape that they know from SGLang.
"""

import datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.state import AppState
from moed.server.messages import RankStats


def loads_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["control"])

    @router.get("/v1/loads")
    async def loads(request: Request) -> Response:
        """Requests running and waiting, and the KV cache in use, by rank and together."""
        return Response(msgspec.json.encode(loads_json(state)), media_type="application/json")

    return router


def loads_json(state: AppState) -> dict[str, Any]:
    """Zeros for a rank that has not stepped yet."""
    num_ranks = state.config.parallel.data_parallel_size
    ranks = [rank_load(rank, state) for rank in range(num_ranks)]
    running = sum(load["num_running_reqs"] for load in ranks)
    waiting = sum(load["num_waiting_reqs"] for load in ranks)
    usage = sum(load["token_usage"] for load in ranks) / num_ranks
    utilization = sum(load["utilization"] for load in ranks) / num_ranks
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": state.version,
        "status": state.health.phase.value,
        "num_open_requests": state.open_requests.num_open,
        "dp_rank_count": num_ranks,
        "loads": ranks,
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": round(usage, 4),
            "avg_utilization": round(utilization, 4),
        },
    }


def rank_load(rank: int, state: AppState) -> dict[str, Any]:
    stats: RankStats | None = state.metrics.stats_of(rank)
    cache, most = state.config.cache, state.config.scheduler.max_num_seqs
    running = 0 if stats is None else stats.num_running
    waiting = 0 if stats is None else stats.num_waiting
    used = 0 if stats is None else stats.num_kv_blocks_used
    blocks = state.engine.num_kv_blocks if stats is None else stats.num_kv_blocks
    asked = 0 if stats is None else stats.num_prefix_queries
    return {
        "dp_rank": rank,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_queued_tokens": 0 if stats is None else stats.num_queued_tokens,
        "num_used_tokens": used * cache.block_size,
        "max_total_num_tokens": blocks * cache.block_size,
        "max_running_requests": most,
        "token_usage": round(used / blocks, 4) if blocks else 0.0,
        "utilization": round(running / most, 4),
        "cache_hit_rate": round(stats.num_prefix_hits / asked, 4) if stats and asked else 0.0,
    }
