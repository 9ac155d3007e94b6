"""What is made of tokens, and what happens to requests, goes on across the loss of a rank."""

import signal
import threading
from typing import Any

import httpx
import pytest

from tests.daemon import Daemon, events
from tests.e2e.stalled import BODY as STALLED
from tests.e2e.stalled import StalledReader, await_paused
from tests.e2e.streams import LONG, PROMPT, Stream, assert_same, await_growth, kill
from tests.e2e.test_recovery import RECOVERY_S, assert_well, await_loss

pytestmark = pytest.mark.slow

# Sampled, long, and one at a time: a rank can be lost in the middle of an argument.
CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Note this."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "note",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "minLength": 250, "maxLength": 300},
                    },
                    "required": ["text"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "required",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 900,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Call:
    """A streamed chat request that must call a tool, and its reader."""

    def __init__(self, daemon: Daemon) -> None:
        self.arguments = ""
        self.finish_reasons: list[str] = []
        self.usage: tuple[int, int] | None = None
        self.errors: list[Any] = []
        self.has_begun = threading.Event()
        self._url = f"{daemon.url}/v1/chat/completions"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=CALL, timeout=RECOVERY_S) as response:
                for event in events(response):
                    if event != "[DONE]":
                        self._take(event)
        except httpx.HTTPError as error:
            self.errors.append(error)

    def _take(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        if (usage := event.get("usage")) is not None:
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in event.get("choices", ()):
            for call in choice["delta"].get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])
        if len(self.arguments) > 20:
            self.has_begun.set()

    def join(self) -> "Call":
        self._thread.join(RECOVERY_S)
        assert not self._thread.is_alive() and not self.errors, self.errors
        return self


def test_tool_calls_and_usage() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        expected = Call(daemon).join()
        assert len(expected.arguments) > 250 and expected.usage is not None
        for victim in (0, 1):
            call = Call(daemon)
            assert call.has_begun.wait(RECOVERY_S)
            kill(daemon, f"rank-{victim}")
            await_loss(daemon, victim + 1)
            assert not call.finish_reasons
            call.join()
            assert call.arguments == expected.arguments
            assert (call.finish_reasons, call.usage) == (expected.finish_reasons, expected.usage)
            assert_well(daemon)


def test_stop_strings() -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 4, **LONG, "max_tokens": 400}
    with Daemon() as daemon:
        daemon.wait_ready()
        whole = Stream(daemon, body)
        whole.join()
        text = whole.choices[0].text
        place = next(
            place
            for place in range(len(text) * 3 // 4, len(text) - 5)
            if text.find(text[place : place + 5]) == place
        )
        stopping = {**body, "stop": [text[place : place + 5]]}
        expected = Stream(daemon, stopping)
        expected.join()
        assert expected.choices[0].text == text[:place]
        stream = Stream(daemon, stopping)
        await_growth([stream], 8)
        kill(daemon, "rank-1")
        stream.join(RECOVERY_S)
        assert_same([stream], [expected])
        assert stream.choices[0].finish_reason == "stop"
        assert_well(daemon)


def test_a_client_that_leaves_in_between_leaves_nothing() -> None:
    body = {"prompt": PROMPT, "stream": True, **LONG, "max_tokens": 1900}
    with Daemon() as daemon:
        daemon.wait_ready()
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=30) as left:
            next(events(left))
            kill(daemon, "rank-1")
            await_loss(daemon, 1)
        daemon.wait_ready()
        daemon.assert_at_rest()
        assert_well(daemon)


def test_a_drain_while_the_ranks_recover_finishes_what_is_open() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        body = {**LONG, "prompt": PROMPT, "temperature": 0}
        expected = Stream(daemon, body)
        expected.join()
        stream = Stream(daemon, body)
        await_growth([stream], 8)
        kill(daemon, "rank-1")
        await_loss(daemon, 1)
        daemon.signal(signal.SIGTERM)
        stream.join(RECOVERY_S)
        assert_same([stream], [expected])
        assert daemon.wait_exit(30) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_reader_that_is_paused_stays_so_and_gets_everything_later(victim: int) -> None:
    """Its rank, or the other one, is lost while it reads nothing."""
    with Daemon() as daemon:
        daemon.wait_ready()
        solo = daemon.tokens(STALLED["prompt"], STALLED["max_tokens"])
        with StalledReader(daemon, rank=0) as reader:
            await_paused(daemon, 4, RECOVERY_S)
            other = Stream(daemon, {"prompt": PROMPT, **LONG})
            await_growth([other], 8)
            kill(daemon, f"rank-{victim}")
            await_loss(daemon, 1)
            daemon.wait_ready()
            # All are with new engines, which are told again who does not read.
            await_paused(daemon, 4, RECOVERY_S)
            other.join(RECOVERY_S)
            daemon.assert_at_rest()
            assert reader.read_on() == dict.fromkeys(range(4), solo)
        await_paused(daemon, 0, RECOVERY_S)
        assert_well(daemon)


def test_prefixes_are_computed_anew_and_shared_again() -> None:
    """A group that is formed anew has none of the KV cache of before."""
    prompt = [65 + (7 * index) % 50 for index in range(200)]
    with Daemon() as daemon:
        daemon.wait_ready()
        expected = daemon.complete(prompt, 40)
        assert cached(daemon.complete(prompt, 40)) > 150
        body = {"prompt": prompt, "temperature": 0, **LONG, "max_tokens": 300}
        whole = Stream(daemon, body)
        whole.join()
        streams = [Stream(daemon, body) for _ in range(4)]
        await_growth(streams, 5)
        kill(daemon, "rank-1")
        await_loss(daemon, 1)
        for stream in streams:
            stream.join(RECOVERY_S)
        assert_same(streams, [whole] * 4)
        again = [daemon.complete(prompt, 40, rank) for rank in (0, 1, 0, 1)]
        assert all(tokens(answer) == tokens(expected) for answer in again)
        assert cached(again[2]) > 150 and cached(again[3]) > 150
        assert_well(daemon)


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def tokens(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found
