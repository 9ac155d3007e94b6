"""Every socket that a launch opens: where it listens, and what strangers get from it."""

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.e2e.listening import listeners, unix_listeners
from tests.e2e.nodes import Nodes
from tests.e2e.streams import KINDS, Stream, assert_same

LOOPBACK = "127.0.0.1"
GARBAGE = (
    b"\x00" * 4096,
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(100_000),
    b"\xff" + b"\x7f" * 9 + b"\x03\x01NULL",
)


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def throw(connect: Callable[[], socket.socket], garbage: bytes) -> None:
    """Connect, say it, listen for a moment, leave."""
    with contextlib.suppress(OSError), connect() as connection:
        connection.settimeout(0.1)
        connection.sendall(garbage)
        connection.recv(4096)


def throw_at_all(daemon: Daemon) -> None:
    """Also connections that say nothing, and stay meanwhile."""
    with contextlib.ExitStack() as silent:
        for address in listeners(daemon):
            silent.enter_context(socket.create_connection(address, 5))
            for garbage in GARBAGE:
                throw(lambda at=address: socket.create_connection(at, 5), garbage)  # type: ignore[misc]
        for path in unix_listeners(daemon):
            for garbage in GARBAGE:
                throw(lambda at=path: connect_unix(at), garbage)  # type: ignore[misc]


def connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def test_all_is_on_the_loopback_and_only_this_user_enters_the_rest(daemon: Daemon) -> None:
    found = listeners(daemon)
    assert {address for address, _ in found} == {LOOPBACK}
    assert (LOOPBACK, port_of(daemon.url)) in found
    paths = unix_listeners(daemon)
    assert paths
    for path in paths:
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700


def test_garbage_changes_nothing_for_others(daemon: Daemon) -> None:
    expected = Stream(daemon, KINDS["greedy"])
    expected.join()
    pids = [daemon.pid(name) for name in ("http", "rank-0", "rank-1")]
    stream = Stream(daemon, {**KINDS["greedy"]})
    throw_at_all(daemon)
    stream.join()
    again = Stream(daemon, KINDS["greedy"])
    again.join()
    assert_same([stream, again], [expected, expected])
    assert pids == [daemon.pid(name) for name in ("http", "rank-0", "rank-1")]


@pytest.mark.slow
def test_only_http_goes_to_all_interfaces_when_asked() -> None:
    with Daemon("--host", "0.0.0.0") as daemon:
        port = int(daemon.wait_log(re.compile(r"listening on http://0\.0\.0\.0:(\d+)")).group(1))
        daemon.wait_log(re.compile("ready: moed-demo"))
        found = listeners(daemon)
        assert ("0.0.0.0", port) in found
        assert {address for address, number in found if number != port} == {LOOPBACK}


@pytest.mark.slow
def test_nodes_listen_where_they_are_told_and_garbage_changes_nothing() -> None:
    with Nodes() as nodes:
        first, second = nodes.daemons
        first.wait_ready(90)
        expected = first.tokens([65, 66], 20)
        for node in nodes.daemons:
            assert {address for address, _ in listeners(node)} == {LOOPBACK}
            throw_at_all(node)
        time.sleep(1.0)
        assert first.tokens([65, 66], 20) == expected
        first.assert_alive()
        assert second.process.poll() is None
