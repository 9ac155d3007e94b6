"""One JSON line for each request that has ended. It holds no prompt and no output."""

import json
import logging
import time

from moed.server.ended_requests import EndedChoice, EndedRequest
from moed.server.logs import REQUEST_LOGGER

logger = logging.getLogger(REQUEST_LOGGER)


def log_request(request: EndedRequest) -> None:
    logger.info("%s", json.dumps(request_line(request)))


def request_line(request: EndedRequest) -> dict[str, object]:
    """Times in milliseconds, those of several choices the longest; null where no token came."""
    origin, choices = request.origin, request.choices
    prompts = choices[:: origin.num_per_prompt]
    return {
        "event": "request",
        "time": round(time.time(), 3),
        "request_id": origin.request_id,
        "operation": origin.operation,
        "model": origin.model,
        "ranks": sorted({choice.rank for choice in choices}),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in prompts),
        "cached_tokens": sum(choice.num_cached_tokens for choice in prompts),
        "completion_tokens": sum(choice.num_output_tokens for choice in choices),
        "queue_ms": _longest(choices, "queue_s"),
        "ttft_ms": _longest(choices, "first_token_s"),
        "tpot_ms": _longest(choices, "per_token_s"),
        "e2e_ms": _longest(choices, "e2e_s"),
        "finish_reasons": [choice.reason for choice in choices],
    }


def _longest(choices: tuple[EndedChoice, ...], name: str) -> float | None:
    known = [getattr(c, name) for c in choices if getattr(c, name) is not None]
    return round(1000 * max(known), 3) if known else None
