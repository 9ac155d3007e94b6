"""Open requests of many kinds, read by clients that never retry, for tests of faults under load."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.daemon import Daemon, events

READ_S = 60.0
LONG = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
PROMPT = list(range(60, 110))

# What each kind of state on the way from tokens to a client must survive.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT, "temperature": 0, **LONG},
    "sampled": {"prompt": PROMPT[3:], "temperature": 1.0, "seed": 7, "top_p": 0.9, **LONG},
    "penalties": {
        "prompt": PROMPT[5:],
        "temperature": 0.7,
        "seed": 8,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        **LONG,
    },
    "choices": {"prompt": PROMPT[7:], "temperature": 1.0, "seed": 9, "n": 2, **LONG},
    "logprobs": {"prompt": PROMPT[9:], "temperature": 0, "logprobs": 2, **LONG},
    "prompt_logprobs": {
        "prompt": PROMPT[11:],
        "temperature": 0,
        "prompt_logprobs": 1,
        "stream": False,
        **LONG,
    },
    "grammar": {
        "prompt": "say: ",
        "temperature": 1.0,
        "seed": 10,
        "structured_outputs": {"regex": "([a-m]{3}, ){35}[0-9]{20}"},
        "max_tokens": 900,
        "return_token_ids": True,
    },
    "routed_experts": {
        "prompt": PROMPT[13:],
        "temperature": 0,
        "return_routed_experts": True,
        "stream": False,
        **LONG,
    },
}


@dataclass
class Choice:
    """What one choice has given."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Stream:
    """One request and its reader. `join` it, then compare `choices`."""

    def __init__(self, daemon: Daemon, body: dict[str, Any], rank: int | None = None) -> None:
        self.choices: dict[int, Choice] = {}
        self.error: Any = None
        self.is_done = False
        self.times: list[float] = []
        self._url = f"{daemon.url}/v1/completions"
        self._body = {"stream": True, **body}
        self.is_streamed: bool = self._body["stream"]
        self._headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=READ_S
            ) as response:
                if response.status_code != 200:
                    self.error = response.read()
                    return
                if not self.is_streamed:
                    self._take(json.loads(response.read()))
                    self._take("[DONE]")
                for event in events(response) if self.is_streamed else ():
                    self._take(event)
        except httpx.HTTPError as error:
            self.error = error

    def _take(self, event: Any) -> None:
        self.times.append(time.monotonic())
        if event == "[DONE]":
            self.is_done = True
            return
        self.error = event.get("error", self.error)
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            choice.token_ids += part.get("token_ids") or []
            choice.text += part["text"]
            if part.get("logprobs"):
                choice.logprobs += part["logprobs"]["token_logprobs"]
            choice.finish_reason = part["finish_reason"] or choice.finish_reason
            for name in ("prompt_logprobs", "routed_experts"):
                if part.get(name) is not None:
                    choice.more[name] = part[name]

    @property
    def num_events(self) -> int:
        return len(self.times)

    def wait(self, timeout_s: float) -> None:
        """For its end, whatever that is."""
        self._thread.join(timeout_s)

    def join(self, timeout_s: float = READ_S) -> None:
        """For its good end."""
        self.wait(timeout_s)
        assert not self._thread.is_alive(), f"a stream did not end in {timeout_s} s"
        assert self.error is None, self.error
        assert self.is_done


_killed: set[int] = set()


def kill(daemon: Daemon, name: str) -> None:
    """SIGKILL to the process that is `name` now, however short ago the last one was killed."""
    deadline = time.monotonic() + 10
    while (pid := daemon.pid(name)) in _killed:
        assert time.monotonic() < deadline, f"{name} was not started again"
        time.sleep(0.005)
    _killed.add(pid)
    os.kill(pid, signal.SIGKILL)


def await_growth(streams: list[Stream], num_events: int, timeout_s: float = READ_S) -> float:
    """Until each stream that is not done has given `num_events` more; returns the seconds."""
    started = time.monotonic()
    before = [stream.num_events for stream in streams]
    while not all(
        stream.is_done or not stream.is_streamed or stream.num_events >= old + num_events
        for stream, old in zip(streams, before, strict=True)
    ):
        for stream in streams:
            assert stream.error is None, stream.error
        assert time.monotonic() - started < timeout_s, "not all streams go on"
        time.sleep(0.005)
    return time.monotonic() - started


def await_status(daemon: Daemon, status: str) -> None:
    deadline = time.monotonic() + 20
    while httpx.get(f"{daemon.url}/readyz", timeout=5).json()["status"] != status:
        assert time.monotonic() < deadline, f"not {status}"
        time.sleep(0.02)


def assert_same(streams: list[Stream], expected: list[Stream]) -> None:
    """Complete, with the same tokens, texts, log-probabilities and ends; no token twice."""
    for stream, other in zip(streams, expected, strict=True):
        assert stream.choices.keys() == other.choices.keys()
        for index, choice in other.choices.items():
            found = stream.choices[index]
            assert found.token_ids == choice.token_ids
            assert found.text == choice.text
            assert found.finish_reason == choice.finish_reason
            assert len(found.logprobs) == len(choice.logprobs)
            for one, two in zip(found.logprobs, choice.logprobs, strict=True):
                assert abs(one - two) < 1e-3
            assert found.more.keys() == choice.more.keys()
            if "routed_experts" in choice.more:
                assert choice.more["routed_experts"]
                assert found.more["routed_experts"] == choice.more["routed_experts"]


def start_all(daemon: Daemon) -> list[Stream]:
    """One of each kind."""
    return [Stream(daemon, body) for body in KINDS.values()]


def finish(streams: list[Stream], expected: list[Stream], timeout_s: float) -> None:
    """All end well, and as the `expected` did."""
    for stream in streams:
        stream.join(timeout_s)
    assert_same(streams, expected)
