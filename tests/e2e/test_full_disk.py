"""A full disk costs nobody anything: not the log, not the sockets' folder, not /dev/shm."""

import signal

import pytest

from tests.e2e.streams import KINDS, Stream, assert_same, await_growth, kill
from tests.small_disk import SmallDiskDaemon

pytestmark = pytest.mark.slow

RECOVERY_S = 60.0


def start_all(daemon: SmallDiskDaemon) -> list[Stream]:
    return [Stream(daemon, body) for body in KINDS.values()]


def test_what_is_open_goes_on_and_lost_processes_are_replaced() -> None:
    with SmallDiskDaemon("--log-requests") as daemon:
        daemon.wait_ready()
        expected = start_all(daemon)
        for stream in expected:
            stream.join()
        streams = start_all(daemon)
        await_growth(streams, 5)
        daemon.fill()
        for stream in streams:
            stream.join()
        assert_same(streams, expected)
        for name in ("rank-0", "rank-1"):
            streams, before = start_all(daemon), daemon.children()
            await_growth(streams, 5)
            kill(daemon, name)
            daemon.await_another(name, before, 10)
            for stream in streams:
                stream.join(RECOVERY_S)
            assert_same(streams, expected)
        before = daemon.children()
        kill(daemon, "http")
        daemon.await_another("http", before, 10)
        daemon.wait_ready()
        assert not daemon.takes_more()
        streams = start_all(daemon)
        for stream in streams:
            stream.join()
        assert_same(streams, expected)
        daemon.assert_alive()
        daemon.free()
        # The log goes on as soon as it can.
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(20) == 0
        assert "stopping" in daemon.log


def test_it_may_be_full_when_the_daemon_stops() -> None:
    with SmallDiskDaemon() as daemon:
        daemon.wait_ready()
        daemon.fill()
        daemon.assert_alive()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(20) == 0
