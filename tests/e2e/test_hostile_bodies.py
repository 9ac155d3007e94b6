"""Huge and lying bodies are refused at once, and none of them stays in memory."""

import json
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.daemon import Daemon
from tests.e2e.memory_watch import MemoryWatch

MIB = 2**20
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")
NUM_ROUNDS = 4
# Bodies of one round are hundreds of MiB; what a heap keeps of the largest one is not a leak.
MAX_GROWTH_MIB = 64


def pieces() -> Iterator[bytes]:
    """A body whose length is told nobody before."""
    for _ in range(64):
        yield b"a" * MIB


BODIES: dict[str, bytes | Callable[[], Iterator[bytes]]] = {
    "64 MiB": b'{"prompt": "' + b"a" * (64 * MIB) + b'"}',
    "64 MiB in pieces": pieces,
    "as long as is taken": b'{"prompt": "' + b"ab " * (10 * MIB) + b'"}',
    "many messages": json.dumps({"messages": [{"role": "user", "content": "a"}] * 10_000}).encode(),
    "deep": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "many values": b'{"prompt": [' + b"1," * (8 * MIB) + b"1]}",
}


def attack(daemon: Daemon) -> None:
    """One round of all of them; each is refused within seconds."""
    for path in PATHS:
        for name, body in BODIES.items():
            content = body if isinstance(body, bytes) else body()
            headers = {"Content-Type": "application/json"}
            try:
                answer = httpx.post(daemon.url + path, content=content, headers=headers, timeout=20)
            except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
                # Refused and closed while it was still being sent.
                assert "64 MiB" in name
                continue
            assert answer.status_code in (400, 413), (path, name, answer.text[:200])
            assert "error" in answer.json()
        lie(daemon, path)


def lie(daemon: Daemon, path: str) -> None:
    """More is promised than is sent, and then nothing."""
    host, port = daemon.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 33000000\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head + b'{"prompt": "' + b"a" * MIB)


@pytest.mark.slow
def test_hostile_bodies_leave_memory_flat(daemon: Daemon) -> None:
    pids = [daemon.pid("http"), daemon.pid("rank-0"), daemon.pid("rank-1")]
    watch = MemoryWatch()
    for _ in range(NUM_ROUNDS + 1):
        attack(daemon)
        time.sleep(0.2)
        watch.sample(pids)
    for pid in pids:
        # The first round is what caches and pools grow by.
        _, first, *others = (mib for _, mib in watch.samples[pid])
        assert max(others) < first + MAX_GROWTH_MIB, watch.samples[pid]
