"""Storms of clients that come and go in every way: descriptors, threads and requests return to
where they were, and a daemon out of descriptors serves again once clients have left.
"""

import concurrent.futures
import contextlib
import json
import socket
import sys
import time

import httpx
import psutil
import pytest

from tests.daemon import Daemon

NUM_CONNECTIONS = 500
SETTLE_S = 10.0
LONG = {"prompt": [65, 66], "max_tokens": 2000, "ignore_eos": True}


def come_and_go(daemon: Daemon, number: int) -> None:
    """One client: connects, and leaves at some point of a request or of its answer."""
    host, port = daemon.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": number % 2 == 0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    sent = (b"", head[:20], head, head + body[:9], head + body)[number // 2 % 5]
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        if sent.endswith(body) and number % 2 == 0:
            connection.recv(100)


def storm(daemon: Daemon, num_connections: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        for done in [pool.submit(come_and_go, daemon, n) for n in range(num_connections)]:
            done.result(60)
        sums = [
            pool.submit(daemon.post, "/v1/completions", {"prompt": "1 + 2", "max_tokens": 2})
            for _ in range(50)
        ]
        assert all(done.result(60).status_code == 200 for done in sums)


def levels(daemon: Daemon) -> dict[str, tuple[int, int]]:
    """Descriptors and threads of each process."""
    found = {}
    for name in ("http", *(f"rank-{rank}" for rank in range(daemon.ranks))):
        process = psutil.Process(daemon.pid(name))
        found[name] = (process.num_fds(), process.num_threads())
    return found


def test_descriptors_and_threads_return_after_a_storm(daemon: Daemon) -> None:
    # Pools of threads grow once, when they are first needed.
    storm(daemon, 60)
    daemon.assert_at_rest(SETTLE_S)
    time.sleep(0.5)
    before = levels(daemon)
    storm(daemon, NUM_CONNECTIONS)
    daemon.assert_at_rest(SETTLE_S)
    deadline = time.monotonic() + SETTLE_S
    while any(now > then for now, then in zip(flat(levels(daemon)), flat(before), strict=True)):
        assert time.monotonic() < deadline, (before, levels(daemon))
        time.sleep(0.1)


def flat(found: dict[str, tuple[int, int]]) -> list[int]:
    return [number for pair in found.values() for number in pair]


@pytest.mark.slow
def test_a_daemon_out_of_descriptors_serves_again_when_clients_leave() -> None:
    limited = f'ulimit -n 160; exec {sys.executable} -m moed.server "$@"'
    with Daemon(ranks=1, command=("sh", "-c", limited, "moed")) as daemon:
        daemon.wait_ready()
        host, port = daemon.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, int(port)), timeout=2)
                    stack.enter_context(connection)
            time.sleep(1.0)
            with contextlib.suppress(httpx.TransportError):
                daemon.post("/v1/completions", {"prompt": [65], "max_tokens": 1}, timeout=2)
            assert daemon.process.poll() is None
        deadline = time.monotonic() + 30
        while True:
            try:
                daemon.assert_alive()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.5)
