"""A client that asks for a long answer and stops reading: its choices pause, then it is cut off."""

import contextlib
import json
import select
import socket
import time
from types import TracebackType
from typing import Any

from tests.daemon import Daemon

# Large events, many times what all buffers on the way hold.
BODY: dict[str, Any] = {
    "prompt": [65, 66],
    "temperature": 0,
    "n": 4,
    "logprobs": 20,
    "max_tokens": 1900,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}
# So that little of the answer lies in the kernel.
RECEIVE_BYTES = 8192


class StalledReader:
    """Sends its request at once and reads nothing until `read_on`. Use as a context."""

    def __init__(self, daemon: Daemon, rank: int | None = None) -> None:
        host, port = daemon.url.removeprefix("http://").split(":")
        content = json.dumps(BODY).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        if rank is not None:
            lines.append(f"X-data-parallel-rank: {rank}")
        self._connection = socket.socket()
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._connection.settimeout(60)
        self._connection.connect((host, int(port)))
        self._connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def read_on(self) -> dict[int, list[int]]:
        """The tokens of each choice; fails unless the answer is whole."""
        received = b""
        while part := self._connection.recv(1 << 16):
            received += part
        assert received.count(b"data: [DONE]") == 1
        tokens: dict[int, list[int]] = {}
        for line in received.splitlines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
        return tokens

    def wait_cut_off(self, timeout_s: float) -> None:
        """Until the server has ended the connection; nothing is read for it."""
        poll = select.poll()
        poll.register(self._connection, 0)
        assert poll.poll(1000 * timeout_s), f"not cut off within {timeout_s} s"

    def __enter__(self) -> "StalledReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def num_paused(daemon: Daemon) -> float:
    """Requests that wait for their clients, on all ranks."""
    samples = daemon.series("moed:num_requests_waiting_by_reason")
    return sum(value for labels, value in samples if labels["reason"] == "deferred")


def await_paused(daemon: Daemon, expected: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (count := num_paused(daemon)) != expected:
        assert time.monotonic() < deadline, f"{count} paused requests, not {expected}"
        time.sleep(0.05)
