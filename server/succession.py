"""Under torchrun the front end outlives the ranks: those that torchrun starts next adopt it.

It answers at a socket with a name that follows from torchrun's process, which starts all ranks of a
node and lives as long as they may be started. Linux only: the name is in no folder, the kernel says
who connects, and torchrun's end is something to wait for.
"""

import contextlib
import logging
import os
import socket
import struct
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil

from moed.server.messages import Wired

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def is_possible() -> bool:
    """Whether this system has what it takes; the log says what is missing."""
    try:
        if sys.platform == "linux":
            os.close(os.pidfd_open(os.getpid()))
            _address(os.getpid())
            return True
        reason = "only Linux has what it takes"
    except OSError as error:
        reason = f"this system has no pidfd_open or no /proc ({error.strerror})"
    logger.warning("open requests will not wait for ranks that torchrun starts again: %s", reason)
    return False


def _address(agent_pid: int) -> str:
    # A name that begins with a zero byte is in no folder. Containers may share it, and not the
    # numbers of processes.
    return f"\0moed-{os.getuid()}-{os.readlink('/proc/self/ns/pid')}-{agent_pid}"


class Succession:
    """The front end's side, for one event loop."""

    def __init__(self, agent_pid: int) -> None:
        """`agent_pid`: torchrun's. Raises `OSError` where it has ended."""
        self._agent_pid = agent_pid
        self.agent_fd = os.pidfd_open(agent_pid)
        """Readable once torchrun has ended."""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(_address(agent_pid))
        self.listener.listen()

    def accept(self) -> Connection | None:
        """Whoever has come, if it is a process of this user that torchrun has started."""
        with contextlib.suppress(OSError, psutil.Error):
            peer, _ = self.listener.accept()
            with peer:
                pid, uid = _peer(peer)
                if uid == os.getuid() and psutil.Process(pid).ppid() == self._agent_pid:
                    return Connection(peer.detach())
        return None


@dataclass(frozen=True)
class Heirs:
    """Other ranks may follow those that are there, and take over the launcher's end of the pipe."""

    succession: Succession
    wired: Wired
    """What each is told, with the epoch of the time."""


def find_predecessor(agent_pid: int) -> tuple[Connection, int] | None:
    """A front end of earlier ranks, and its process; None where there is none."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
        link.connect(_address(agent_pid))
        pid, uid = _peer(link)
        if uid == os.getuid():
            return Connection(link.detach()), pid
    return None


def _peer(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
