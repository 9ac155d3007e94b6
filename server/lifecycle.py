"""How a child process stays tied to its parent, and how a process's end reads to a person."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NoReturn

from moed.server.wire import Wire


@dataclass(frozen=True)
class FrontendPlace:
    """What a front end must know of those before it."""

    wire: Wire
    """Where it listens for the ranks."""
    number: int
    """How many there have been before."""
    epoch: int
    """Of the group of ranks."""
    listener: socket.socket | None = None
    """Bound to the address of a wire between nodes."""


PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """End this process, even when stuck in a system call, as soon as its parent ends.

    On Linux the kernel does it. Elsewhere, and for a parent that died before the kernel was asked,
    a thread waits for the parent's end. Call it first in a child, before heavy imports.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sentinel = parent.sentinel
    if not wait_for(sentinel, 0.0):
        watcher = threading.Thread(target=_end_after, args=(sentinel,), daemon=True)
        watcher.start()
        return
    os._exit(1)


def die_after_parent(seconds: float) -> None:
    """As `die_with_parent`, with `seconds` left to say what must be said."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        arguments = (parent.sentinel, seconds)
        threading.Thread(target=_end_after, args=arguments, daemon=True).start()


def wait_for(sentinel: int, timeout_s: float | None) -> bool:
    """True once the process behind `sentinel` has ended, within `timeout_s` (None: no bound)."""
    return bool(wait([sentinel], timeout_s))


def _end_after(sentinel: int, seconds: float = 0.0) -> None:
    wait_for(sentinel, None)
    time.sleep(seconds)
    os._exit(1)


def leave(exit_code: int) -> NoReturn:
    """End this process now, with all that was logged written. Threads that libraries have left
    behind can abort a process whose interpreter ends in the usual way.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def describe_exit(exit_code: int | None) -> str:
    """`exit code 3`, or `killed by SIGKILL`, from `Process.exitcode`."""
    if exit_code is None:
        return "still running"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
