"""A daemon that can write on one small disk alone: its log, its temporary files and /dev/shm lie
there, and everything else is read-only to it.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType

import psutil
import pytest

from tests.daemon import Daemon

SIZE = "2m"
NUM_FILES = 64
# In a mount namespace of its own, which ends with its processes.
SCRIPT = f"""
set -e
disk=$1 python=$2
shift 2
mount -t tmpfs -o size={SIZE},nr_inodes={NUM_FILES} moed "$disk"
mkdir "$disk/tmp" "$disk/shm"
mount --bind "$disk/shm" /dev/shm
mount -o remount,bind,ro /
cd "$disk"
exec "$python" -m moed.server "$@" 2> "$disk/log"
"""
TRY = "mount -t tmpfs moed /mnt && mount -o remount,bind,ro /"


def own_mounts() -> tuple[str, ...]:
    """The command line that gives what follows mounts of its own."""
    return ("unshare", "--mount", *(("--map-root-user",) if os.geteuid() else ()), "--")


def why_not() -> str | None:
    """Why there can be no such disk here."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "mounts of its own need Linux and unshare"
    command = [*own_mounts(), "sh", "-c", TRY]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return f"no mounts here: {tried.stderr.strip()}" if tried.returncode else None


class SmallDiskDaemon(Daemon):
    """Skips the test where nothing may be mounted."""

    def __init__(self, *arguments: str, ranks: int = 2) -> None:
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        self._folder = tempfile.mkdtemp(prefix="moed-disk-")
        self._files = 0
        python = sys.executable
        command = (*own_mounts(), "sh", "-c", SCRIPT, "sh", self._folder, python)
        super().__init__(
            *arguments, ranks=ranks, command=command, environment={"TMPDIR": f"{self._folder}/tmp"}
        )

    @property
    def disk(self) -> pathlib.Path:
        """As seen from here, while the daemon runs."""
        return pathlib.Path(f"/proc/{self.process.pid}/root{self._folder}")

    def _read(self) -> None:
        """The log lies on the disk."""
        rest = b""
        position = 0
        while True:
            has_ended = self.process.poll() is not None
            with contextlib.suppress(OSError), open(self.disk / "log", "rb") as log:
                log.seek(position)
                new = log.read()
                position += len(new)
                *whole, rest = (rest + new).split(b"\n")
                self.lines += [line.decode(errors="replace") for line in whole]
            if has_ended:
                return
            time.sleep(0.02)

    # The disk ------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Until it takes no byte and no file more."""
        with contextlib.suppress(OSError), open(self.disk / "ballast", "ab", buffering=0) as file:
            for size in (65536, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        with contextlib.suppress(OSError):
            while True:
                (self.disk / f"ballast-{self._files}").touch(exist_ok=False)
                self._files += 1
        assert not self.takes_more(), "the disk is not full"

    def takes_more(self) -> bool:
        """A byte, or a file."""
        try:
            (self.disk / "one-more").write_bytes(b"x")
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return False
        return True

    def free(self) -> None:
        """Take away what `fill` has put there."""
        for file in self.disk.glob("ballast*"):
            file.unlink()
        self._files = 0

    # Processes -----------------------------------------------------------------------------------

    def children(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def await_another(self, name: str, before: set[int], timeout_s: float) -> None:
        """Until the launcher has started another process, which is `name` from now on: the log
        cannot say so.
        """
        deadline = time.monotonic() + timeout_s
        while not (new := self.children() - before):
            assert time.monotonic() < deadline, f"{name} was not started again"
            time.sleep(0.01)
        self.lines += [f"started {name}: process {pid}" for pid in new]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)
