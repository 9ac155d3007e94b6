"""A client that reads slowly costs a bounded amount of memory, and nobody else anything: its
choices pause, and go on when it reads; one that reads nothing at all is cut off.
"""

import contextlib
import json
import pathlib
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moed.server import engine_client
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

# Large events: 20 log-probabilities a token, many times what all buffers on the way hold.
BODY = {"prompt": [65, 66, 67], "max_tokens": 500, "n": 4, "logprobs": 20, "stream": True}
SMALL = 8192
DEFERRED = re.compile(r'moed:num_requests_waiting_by_reason\{.*reason="deferred"\} (\S+)')


@contextlib.contextmanager
def reader(served: Served, path: str, body: Any) -> Iterator[socket.socket]:
    """A request whose answer's reader keeps little in the kernel's buffers."""
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(head.encode() + content)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def num_held(served: Served) -> int:
    return sum(engine.num_held for engine in served.engines)


def num_deferred(served: Served) -> float:
    return sum(float(number) for number in DEFERRED.findall(served.get("/metrics").text))


@pytest.fixture(scope="module")
def served(checkpoint: pathlib.Path) -> Iterator[Served]:
    """Not the one that all share: this one's buffers are small."""
    with Served(frontend_config(checkpoint)) as own:
        yield own


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD_OUTPUTS", 100)
    monkeypatch.setattr(engine_client, "RESUME_UNREAD_OUTPUTS", 20)


@pytest.mark.usefixtures("small_bounds")
def test_a_stalled_reader_pauses_and_gets_all_when_it_reads_again(served: Served) -> None:
    whole = served.stream("/v1/completions", **BODY)
    for engine in served.engines:
        engine.tokens_per_step, engine.step_s = 10, 0.01
    with reader(served, "/v1/completions", BODY) as connection:
        served.wait(lambda: num_held(served) == 4, timeout_s=10)
        assert served.num_running == 0
        (submission,) = {id(s): s for s in open_submissions(served)}.values()
        # The bound, and what was on its way when it was reached: a step's tokens of each choice.
        assert len(submission._outputs) <= 100 + 20 * 4
        served.wait(lambda: num_deferred(served) == 4)
        # Others are served meanwhile.
        assert served.complete(prompt=[70], max_tokens=50)["usage"]["completion_tokens"] == 50
        assert num_held(served) == 4
        received = read_all(connection)
    events = [json.loads(e) for e in re.findall(rb"^data: (\{.*)$", received, re.M)]
    assert received.count(b"data: [DONE]") == 1
    for index in range(4):
        assert texts(events, index) == texts(whole[:-1], index)
    served.wait(lambda: num_held(served) == 0)


def open_submissions(served: Served) -> list[engine_client.Submission]:
    return [choice.submission for choice in served.state.engine._choices.values()]


def texts(events: list[Any], index: int) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.usefixtures("small_bounds")
def test_a_client_that_leaves_while_paused_frees_everything(served: Served) -> None:
    with reader(served, "/v1/completions", BODY):
        served.wait(lambda: num_held(served) == 4, timeout_s=10)
    served.wait(lambda: num_held(served) == 0)
    served.wait(lambda: served.state.engine.num_open == 0)


@pytest.fixture(scope="module")
def impatient(checkpoint: pathlib.Path) -> Iterator[Served]:
    with Served(frontend_config(checkpoint, slow_reader_timeout_s=0.4)) as served:
        yield served


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_reads_nothing_is_cut_off(
    impatient: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with reader(impatient, "/v1/completions", {**BODY, "stream": stream}) as connection:
        impatient.wait(lambda: impatient.state.open_requests.num_open == 1)
        impatient.wait(lambda: "cut off" in caplog.text, timeout_s=10)
        impatient.wait(lambda: impatient.state.open_requests.num_open == 0)
        impatient.wait(lambda: impatient.state.engine.num_open == 0)
        received = read_all(connection)
    assert b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")
    assert impatient.complete(prompt=[70], max_tokens=2)["choices"]


def test_a_slow_but_steady_reader_is_not_cut_off(impatient: Served) -> None:
    body = {**BODY, "n": 1}
    with reader(impatient, "/v1/completions", body) as connection:
        received, started = b"", time.monotonic()
        while time.monotonic() - started < 1.5:
            received += connection.recv(2048)
            time.sleep(0.05)
        received += read_all(connection)
    assert received.count(b"data: [DONE]") == 1
