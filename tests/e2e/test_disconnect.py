"""Clients that leave, at any moment, leave nothing behind; ids of clients never mix requests."""

import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon import Daemon, events
from tests.e2e.stalled import BODY as STALLED
from tests.e2e.stalled import StalledReader, await_paused


@contextlib.contextmanager
def raw_request(daemon: Daemon, body: dict[str, Any], rank: int = 0) -> Iterator[socket.socket]:
    """A request on a plain socket, cut off without ceremony at the end of the block."""
    host, port = daemon.url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"X-data-parallel-rank: {rank}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


def running(daemon: Daemon) -> float:
    samples = daemon.metrics()
    return sum(
        samples[f"moed:num_requests_{state}", rank]
        for state in ("running", "waiting")
        for rank in range(daemon.ranks)
    )


def wait_running(daemon: Daemon, expected: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (count := running(daemon)) != expected:
        assert time.monotonic() < deadline, f"{count} open requests, not {expected}"
        time.sleep(0.02)


LONG = {"prompt": [65, 66], "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_client_that_leaves_frees_its_request(daemon: Daemon, streamed: bool) -> None:
    with contextlib.ExitStack() as stack:
        for index in range(20):
            stack.enter_context(raw_request(daemon, {**LONG, "stream": streamed}, index % 2))
        wait_running(daemon, 20, 10)
    wait_running(daemon, 0, 2)


def test_client_that_leaves_while_queued_or_prefilling() -> None:
    arguments = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    with Daemon(*arguments) as daemon:
        daemon.wait_ready()
        with raw_request(daemon, {**LONG, "stream": True}) as first:
            first.recv(100)
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    queued = {**LONG, "request_id": "the-same"}
                    stack.enter_context(raw_request(daemon, queued))
                wait_running(daemon, 21, 10)
            wait_running(daemon, 1, 2)
        wait_running(daemon, 0, 2)
        again = daemon.post(
            "/v1/completions", {"prompt": [65], "max_tokens": 2, "request_id": "the-same"}, 0
        )
        assert again.status_code == 200, again.text
        # A prompt of 100 steps, cut in the middle of its prefill.
        with raw_request(daemon, {"prompt": [70] * 1600, "max_tokens": 400}):
            wait_running(daemon, 1, 10)
        wait_running(daemon, 0, 2)
        daemon.assert_alive()


def test_client_that_leaves_stops_all_its_choices(daemon: Daemon) -> None:
    with raw_request(daemon, {**LONG, "n": 4, "stream": True}):
        wait_running(daemon, 4, 10)
    wait_running(daemon, 0, 2)


def test_stream_cut_on_its_first_byte_many_times(daemon: Daemon) -> None:
    def cut(index: int) -> None:
        body = {"prompt": [65 + index % 20], "max_tokens": 1, "stream": True}
        with raw_request(daemon, body, index % 2) as connection:
            connection.recv(1)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(cut, range(200)))


def test_two_live_requests_with_one_client_id(daemon: Daemon) -> None:
    prompts = ([65, 66, 67], [80, 81, 82, 83])
    solo = [daemon.tokens(prompt, 40) for prompt in prompts]
    shared = {"request_id": "mine"}

    def ask(index: int) -> list[int]:
        answer = daemon.complete(prompts[index % 2], 40, (index // 2) % 2, **shared)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [solo[index % 2] for index in range(8)]


def test_slow_client_gets_everything(daemon: Daemon) -> None:
    body = {**LONG, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60) as response:
        received = []
        for event in events(response):
            received.append(event)
            if len(received) == 5:
                time.sleep(1.0)
    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_a_stalled_reader_gives_up_its_blocks_and_gets_everything_later(daemon: Daemon) -> None:
    solo = daemon.tokens(STALLED["prompt"], STALLED["max_tokens"])
    with StalledReader(daemon) as reader:
        # Nobody reads: all four are put aside, and hold no KV block.
        await_paused(daemon, 4, 60)
        daemon.assert_at_rest()
        assert daemon.complete([70], 20)["usage"]["completion_tokens"] == 20
        assert reader.read_on() == dict.fromkeys(range(4), solo)
