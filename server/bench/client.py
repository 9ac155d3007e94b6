"""Sends a load and notes what comes back, by streaming completions of token ids."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from moed.server.bench.workload import Ask, Load

MAX_ERROR_CHARACTERS = 300


@dataclass
class Seen:
    """What the clients saw of one load. Times in seconds; a failed request counts in no time."""

    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_failed: int = 0
    first_error: str = ""
    most_open: int = 0
    wall_s: float = 0.0

    def fail(self, error: str) -> None:
        self.num_failed += 1
        self.first_error = self.first_error or error[:MAX_ERROR_CHARACTERS]


@dataclass(frozen=True)
class Target:
    """Who is asked."""

    url: str
    """Of the server, without /v1."""
    model: str | None
    api_key: str | None
    timeout_s: float
    temperature: float

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if self.model is None else {**body, "model": self.model}

    @property
    def headers(self) -> dict[str, str]:
        key = self.api_key
        return {} if key is None else {"Authorization": f"Bearer {key}"}


async def run_load(target: Target, load: Load, asks: Sequence[Ask], seed: int) -> Seen:
    """Send all of `asks`, and wait for their ends."""
    seen, num_open = Seen(), 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def send(client: httpx.AsyncClient, ask: Ask) -> None:
        nonlocal num_open
        num_open += 1
        seen.most_open = max(seen.most_open, num_open)
        await _send(client, target, ask, seen)
        num_open -= 1

    async with httpx.AsyncClient(
        timeout=target.timeout_s, limits=limits, headers=target.headers
    ) as client:
        start = time.perf_counter()
        if load.rate is None:
            waiting = list(reversed(asks))

            async def worker() -> None:
                while waiting:
                    await send(client, waiting.pop())

            await asyncio.gather(*(worker() for _ in range(load.num_clients or 1)))
        else:

            async def later(ask: Ask, delay_s: float) -> None:
                await asyncio.sleep(max(0.0, start + delay_s - time.perf_counter()))
                await send(client, ask)

            arrivals = load.arrivals(len(asks), seed)
            await asyncio.gather(*map(later, asks, arrivals))
        seen.wall_s = time.perf_counter() - start
    return seen


async def _send(client: httpx.AsyncClient, target: Target, ask: Ask, seen: Seen) -> None:
    start, stamps = time.perf_counter(), list[float]()
    usage: dict[str, int] = {}
    try:
        async with client.stream(
            "POST", f"{target.url}/v1/completions", json=target.body(ask)
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return seen.fail(f"status {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    return seen.fail(str(event["error"]))
                usage = event.get("usage") or usage
                if event["choices"] and event["choices"][0].get("text"):
                    stamps.append(time.perf_counter())
    except (httpx.HTTPError, msgspec.DecodeError, LookupError, TypeError) as error:
        return seen.fail(f"{type(error).__name__}: {error}")
    if not usage:
        return seen.fail("the stream ended without telling its usage")
    if not stamps:
        # Tokens may have no text: then the end is all that was seen.
        stamps.append(time.perf_counter())
    seen.num_prompt_tokens += usage["prompt_tokens"]
    seen.num_output_tokens += usage["completion_tokens"]
    seen.first_token_s.append(stamps[0] - start)
    seen.whole_s.append(time.perf_counter() - start)
    pairs = zip(stamps, stamps[1:], strict=False)
    seen.between_tokens_s.extend(after - before for before, after in pairs)
    return None
