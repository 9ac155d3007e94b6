"""A full disk costs nobody anything: not the log, not the sockets' folder, not /dev/shm. Nor does a
log that takes nothing, as on a disk that hangs.
"""

import fcntl
import re
import signal
import time

import psutil
import pytest

from tests.daemon import Daemon
from tests.e2e.streams import READ_S, await_growth, finish, kill, start_all
from tests.small_disk import SmallDiskDaemon

pytestmark = pytest.mark.slow

RECOVERY_S = 60.0
F_SETPIPE_SZ = 1031


def test_what_is_open_goes_on_and_lost_processes_are_replaced() -> None:
    with SmallDiskDaemon("--log-requests") as daemon:
        daemon.wait_ready()
        expected = start_all(daemon)
        for stream in expected:
            stream.join()
        streams = start_all(daemon)
        await_growth(streams, 5)
        daemon.fill()
        finish(streams, expected, READ_S)
        for name in ("rank-0", "rank-1"):
            streams, before = start_all(daemon), daemon.children()
            await_growth(streams, 5)
            kill(daemon, name)
            daemon.await_another(name, before, 10)
            finish(streams, expected, RECOVERY_S)
        before = daemon.children()
        kill(daemon, "http")
        daemon.await_another("http", before, 10)
        daemon.wait_ready()
        assert not daemon.takes_more()
        streams = start_all(daemon)
        finish(streams, expected, READ_S)
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


class UnreadDaemon(Daemon):
    """Its log goes into a pipe of which little fits, and which nobody reads while `is_deaf`."""

    is_deaf = False

    def _read(self) -> None:
        assert self.process.stderr is not None
        fcntl.fcntl(self.process.stderr, F_SETPIPE_SZ, 4096)
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            while self.is_deaf:
                time.sleep(0.02)


def test_a_log_that_takes_nothing_holds_nobody_up() -> None:
    with UnreadDaemon("--log-requests") as daemon:
        daemon.wait_ready()
        expected = start_all(daemon)
        for stream in expected:
            stream.join()
        daemon.is_deaf = True
        # Far more lines than the pipe takes.
        for _ in range(100):
            assert daemon.tokens([65, 66], 1)
        streams, launcher = start_all(daemon), psutil.Process(daemon.process.pid)
        await_growth(streams, 5)
        before = {child.pid for child in launcher.children()}
        kill(daemon, "rank-1")
        finish(streams, expected, RECOVERY_S)
        assert len({child.pid for child in launcher.children()} - before) == 1
        daemon.assert_alive()
        daemon.is_deaf = False
        daemon.wait_log(re.compile("ready again"), 20)
        daemon.is_deaf = True
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        daemon.is_deaf = False
