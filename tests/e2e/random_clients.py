"""Clients for long runs: random requests of every kind, some of which are left, stalled or
nonsense; each is accounted for, and what has a known answer is compared with it.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/completions"
ABORT_SHARE, STALL_SHARE, BAD_SHARE, KNOWN_SHARE = 0.2, 0.03, 0.05, 0.3
STALL_S = 2.0
# Between two pieces of an answer.
MAX_SILENCE_S = 60.0
BAD_BODIES: Sequence[dict[str, Any]] = (
    {"prompt": [65], "top_p": 7},
    {"prompt": [-1]},
    {"prompt": []},
    {"prompt": [65], "max_tokens": "many"},
    {"prompt": [65] * 5000},
    {"prompt": [65], "structured_outputs": {"json": {"type": "nope"}}},
)


@dataclass
class Known:
    """A greedy request, and the tokens that it gave alone."""

    prompt: list[int]
    tokens: list[int]


@dataclass
class Accounts:
    """What became of every request: `sent` is the sum of the others."""

    outcomes: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    """By the outcome of their request; nonsense has none."""
    num_sent: int = 0
    num_compared: int = 0
    longest_silence_s: float = 0.0


class RandomClient:
    """Sends one request after the other until it is told to stop."""

    def __init__(self, url: str, seed: int, known: Sequence[Known], accounts: Accounts) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._known = known
        self._accounts = accounts

    async def run(self, until: float, may_go_on: asyncio.Event) -> None:
        """`until`: a time of `time.monotonic()`. Fails on the first wrong answer."""
        limits = httpx.Timeout(MAX_SILENCE_S)
        async with httpx.AsyncClient(base_url=self._url, timeout=limits) as http:
            while time.monotonic() < until:
                await may_go_on.wait()
                self._accounts.num_sent += 1
                outcome = await self._one(http)
                self._accounts.outcomes[outcome] += 1
                if self._random.random() < 0.1:
                    await asyncio.sleep(self._random.uniform(0, 1))

    async def _one(self, http: httpx.AsyncClient) -> str:
        if self._random.random() < BAD_SHARE:
            answer = await http.post(PATH, json=self._random.choice(BAD_BODIES))
            assert answer.status_code == 400, answer.text
            return "refused"
        known = self._random.choice(self._known) if self._random.random() < KNOWN_SHARE else None
        body = self._body(known)
        cut_after = None
        if known is None and self._random.random() < ABORT_SHARE / (1 - KNOWN_SHARE):
            cut_after = self._random.randrange(1, 60)
        send = self._stream if body["stream"] else self._whole
        outcome = await send(http, body, known, cut_after)
        self._accounts.choices[outcome] += body.get("n", 1)
        return outcome

    def _body(self, known: Known | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self._random.random() < 0.7,
        }
        if known is not None:
            max_tokens = self._random.randrange(1, len(known.tokens) + 1)
            return {**body, "prompt": known.prompt, "max_tokens": max_tokens, "temperature": 0}
        length = self._random.choice((5, 40, 400))
        prompt = [self._random.randrange(20, 400) for _ in range(self._random.randrange(1, length))]
        return {
            **body,
            "prompt": prompt,
            "max_tokens": self._random.randrange(1, 200),
            "temperature": self._random.choice((0, 0.8)),
            "n": self._random.choice((1, 1, 1, 3)),
            "priority": self._random.randrange(3),
        }

    async def _stream(
        self,
        http: httpx.AsyncClient,
        body: dict[str, Any],
        known: Known | None,
        cut_after: int | None,
    ) -> str:
        tokens: list[int] = []
        stall_at = self._random.randrange(1, 30) if self._random.random() < STALL_SHARE else None
        async with http.stream("POST", PATH, json=body) as response:
            assert response.status_code == 200, await response.aread()
            heard_at, num_events = time.monotonic(), 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now, num_events = time.monotonic(), num_events + 1
                self._hear(now - heard_at)
                assert '"error"' not in line, line
                if line == "data: [DONE]":
                    self._compare(known, tokens, body["max_tokens"])
                    return "finished"
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
                if num_events == cut_after:
                    return "cut"
                if num_events == stall_at:
                    await asyncio.sleep(STALL_S)
                heard_at = time.monotonic()
        raise AssertionError("a stream ended without [DONE]")

    async def _whole(
        self,
        http: httpx.AsyncClient,
        body: dict[str, Any],
        known: Known | None,
        cut_after: int | None,
    ) -> str:
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(None if cut_after is None else cut_after / 100):
                answer = await http.post(PATH, json=body)
        except TimeoutError:
            return "cut"
        self._hear(time.monotonic() - sent_at)
        assert answer.status_code == 200, answer.text
        self._compare(known, answer.json()["choices"][0]["token_ids"], body["max_tokens"])
        return "finished"

    def _hear(self, silence_s: float) -> None:
        self._accounts.longest_silence_s = max(self._accounts.longest_silence_s, silence_s)

    def _compare(self, known: Known | None, tokens: list[int], max_tokens: int) -> None:
        if known is not None:
            assert tokens == known.tokens[:max_tokens], (tokens, known)
            self._accounts.num_compared += 1
