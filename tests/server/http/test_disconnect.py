"""A client that leaves frees its request within a second, whatever state it was in."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http.served import Served


@contextlib.contextmanager
def request(served: Served, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a plain socket, closed at the end of the block."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head + payload)
        yield connection


COMPLETION = ("/v1/completions", {"prompt": [1, 2], "max_tokens": 400})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})


MESSAGES = ("/v1/messages", {**CHAT[1], "max_tokens": 400})
RESPONSES = ("/v1/responses", {"input": "hi"})


@pytest.mark.parametrize(("path", "body"), [MESSAGES, RESPONSES], ids=["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_frees_in_every_protocol(
    served: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    for engine in served.engines:
        engine.step_s = 0.02
    with request(served, path, {**body, "stream": stream}):
        served.wait(lambda: served.num_running == 1)
        left_at = time.monotonic()
    served.wait(lambda: served.num_running == 0, timeout_s=2)
    assert time.monotonic() - left_at < 1
    assert served.state.engine.num_open == 0
    served.wait(lambda: served.state.open_requests.num_open == 0)


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["waiting", "running"])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_frees_all_choices(
    served: Served, path: str, body: dict[str, Any], stream: bool, state: str, n: int
) -> None:
    for engine in served.engines:
        engine.is_paused, engine.step_s = state == "waiting", 0.02
    aborted = sum(len(engine.aborted) for engine in served.engines)
    with request(served, path, {**body, "stream": stream, "n": n}):
        served.wait(lambda: served.num_running == n)
        if state == "running":
            time.sleep(0.05)
        left_at = time.monotonic()
    served.wait(lambda: served.num_running == 0, timeout_s=2)
    assert time.monotonic() - left_at < 1
    assert sum(len(engine.aborted) for engine in served.engines) - aborted == n
    assert served.state.engine.num_open == 0
    served.wait(lambda: served.state.open_requests.num_open == 0)


def test_leaving_a_stream_on_its_first_byte_many_times(served: Served) -> None:
    for index in range(100):
        body = {"prompt": [1 + index], "max_tokens": 1 + index % 3, "stream": True}
        with request(served, "/v1/completions", body) as connection:
            connection.recv(1)
    served.wait(lambda: served.state.engine.num_open == 0)
    served.wait(lambda: served.state.open_requests.num_open == 0)
    assert served.complete(prompt="a", max_tokens=1)["choices"]


def test_leaving_before_the_body_is_complete(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt": '
        )
        served.wait(lambda: served.state.open_requests.num_open == 1)
    served.wait(lambda: served.state.open_requests.num_open == 0)


def test_client_that_reads_slowly_gets_everything(served: Served) -> None:
    received = []
    for event in served.events("/v1/completions", prompt=[1, 2], max_tokens=300):
        received.append(event)
        if len(received) == 5:
            time.sleep(0.3)
    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] == "length"


def test_one_client_id_for_two_live_requests(served: Served) -> None:
    for engine in served.engines:
        engine.step_s = 0.005
    texts = {}
    streams = [
        served.events("/v1/completions", prompt="ab"[i], max_tokens=20, request_id="same")
        for i in range(2)
    ]
    for index in range(2):
        next(streams[index])
    for index in range(2):
        events = list(streams[index])[:-1]
        texts[index] = "".join(event["choices"][0]["text"] for event in events)
    # The first event of each has been taken.
    assert texts == {0: "a" * 19, 1: "b" * 19}
