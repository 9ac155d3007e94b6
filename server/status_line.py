"""A line for people every ten seconds, while there is anything to tell."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from moed.server.messages import RankStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@dataclass(frozen=True)
class Totals:
    """Of all ranks, at one moment."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    most_kv_share: float
    """Of the rank whose KV cache is fullest, 0 to 1."""


def totals(stats: list[RankStats]) -> Totals:
    return Totals(
        num_running=sum(rank.num_running for rank in stats),
        num_waiting=sum(rank.num_waiting for rank in stats),
        num_prompt_tokens=sum(rank.num_prompt_tokens for rank in stats),
        num_generation_tokens=sum(rank.num_generation_tokens for rank in stats),
        num_prefix_queries=sum(rank.num_prefix_queries for rank in stats),
        num_prefix_hits=sum(rank.num_prefix_hits for rank in stats),
        most_kv_share=max((r.num_kv_blocks_used / r.num_kv_blocks for r in stats), default=0.0),
    )


def status_line(before: Totals, now: Totals, seconds: float) -> str | None:
    """None when nothing ran, waited or was computed since `before`."""
    num_prompt = now.num_prompt_tokens - before.num_prompt_tokens
    num_output = now.num_generation_tokens - before.num_generation_tokens
    if not (now.num_running or now.num_waiting or num_prompt or num_output):
        return None
    num_asked = now.num_prefix_queries - before.num_prefix_queries
    num_hits = now.num_prefix_hits - before.num_prefix_hits
    line = (
        f"{now.num_running} running, {now.num_waiting} waiting; "
        f"{num_prompt / seconds:,.1f} prompt and {num_output / seconds:,.1f} output tokens/s; "
        f"KV cache {now.most_kv_share:.0%} used"
    )
    return line + (f", {num_hits / num_asked:.0%} of prompts found there" if num_asked else "")


async def tell_status(stats: Callable[[], list[RankStats]]) -> None:
    """Until cancelled."""
    before, told_at = totals(stats()), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now, at = totals(stats()), time.monotonic()
        if (line := status_line(before, now, at - told_at)) is not None:
            logger.info("%s", line)
        before, told_at = now, at
