"""Memory that the ranks of one host share, and the calls that exchange through it.

Each rank makes a region that has no name, and maps those of the others through /proc: nothing is
left behind, however a rank ends. exchange.cpp, which setup.py builds where there is a compiler,
says how the regions are used. Where one rank cannot, none does.
"""

import contextlib
import ctypes
import importlib.machinery
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moed.dist.groups import Groups, collective_errors

logger = logging.getLogger(__name__)

FLAG_BYTES = 64
# How long a rank looks for the others without a pause, where each has a core of its own: waking up
# takes longer than most waits.
SPIN_NS = 100_000
OK, TIMED_OUT, ENDED, CLOSED = range(4)

Pointer, Int = ctypes.c_void_p, ctypes.c_int64


class _Channel(ctypes.Structure):
    """See exchange.cpp."""

    _fields_ = [
        ("rank", Int),
        ("num_ranks", Int),
        ("timeout_ns", Int),
        ("spin_ns", Int),
        ("regions", Pointer),
        ("processes", Pointer),
        ("number", ctypes.c_uint32),
        ("culprit", ctypes.c_int32),
    ]


class Functions:
    """Of exchange.cpp; each takes the address of a channel first and returns a status."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` or `AttributeError` where the file is not as built for."""
        library = ctypes.CDLL(str(path))

        def function(name: str, *arguments: Any) -> Callable[..., int]:
            found = getattr(library, name)
            found.argtypes, found.restype = [Pointer, *arguments], ctypes.c_int
            called: Callable[..., int] = found
            return called

        # own, fields, all
        self.exchange_records = function("moed_exchange_records", Pointer, Int, Pointer)
        # row sizes, sizes, hidden, slots, weights; hidden, slots, weights, places, count
        self.dispatch = function("moed_dispatch", *[Pointer] * 10)
        # row sizes, sizes, results, places, count, total, out, rows sent
        self.combine = function("moed_combine", *[Pointer] * 4, Int, *[Pointer] * 3)
        self.close = function("moed_close")


@cache
def functions() -> Functions | None:
    """None where nothing was built, or what was built does not run here."""
    folder = Path(__file__).parent
    for end in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"exchange{end}"
        if path.is_file():
            try:
                return Functions(path)
            except (OSError, AttributeError) as error:
                logger.warning("ranks of this host share no memory: %s", error)
    return None


class HostChannel:
    """One rank's end. All ranks make the same calls in the same order."""

    def __init__(
        self, groups: Groups, calls: Functions, own: int, peers: list[tuple[int, int]]
    ) -> None:
        """`own`: the descriptor of the own region; `peers`: process and descriptor of every rank.
        Raises `OSError` where a region cannot be mapped or a process not be watched.
        """
        self.calls = calls
        self._is_closed, self._num_running = False, 0
        num_ranks = groups.world_size
        with contextlib.ExitStack() as stack:
            maps, descriptors = [], []
            for rank, (process, descriptor) in enumerate(peers):
                if rank == groups.rank:
                    region = os.dup(own)
                else:
                    region = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    maps.append(stack.enter_context(mmap.mmap(region, 0)))
                finally:
                    os.close(region)
                descriptors.append(os.pidfd_open(process))
                stack.callback(os.close, descriptors[-1])
            self._release = weakref.finalize(self, stack.pop_all().close)
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(region)) for region in maps]
        self._regions = (Pointer * num_ranks)(*addresses)
        self._processes = (ctypes.c_int32 * num_ranks)(*descriptors)
        has_cores = len(os.sched_getaffinity(0)) >= num_ranks
        self._struct = _Channel(
            groups.rank,
            num_ranks,
            int(groups.timeout_s * 1e9),
            SPIN_NS if has_cores else 0,
            ctypes.addressof(self._regions),
            ctypes.addressof(self._processes),
        )
        self._timeout_s = groups.timeout_s
        self._address = ctypes.addressof(self._struct)

    def run(self, call: Callable[..., int], *arguments: Any) -> None:
        """One exchange: `call` is one of `calls`. Raises `RuntimeError` naming the rank that ended,
        left, or did not come in time.
        """
        if self._is_closed:
            raise RuntimeError("this rank has left the exchange")
        self._num_running += 1
        try:
            status = call(self._address, *arguments)
        finally:
            self._num_running -= 1
        if status == OK:
            return
        reasons = {
            TIMED_OUT: f"did not come within {self._timeout_s:g} s",
            ENDED: "has ended",
            CLOSED: "has left",
        }
        raise RuntimeError(f"rank {self._struct.culprit} {reasons[status]}")

    def close(self) -> None:
        """Let peers that still wait for this rank know, and free a call that another thread makes.
        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.calls.close(self._address)
        # Another thread may be waiting in a call, which uses all of it.
        if not self._num_running:
            self._release()


def open_channel(groups: Groups, num_bytes: int) -> HostChannel | None:
    """Regions with `num_bytes` for each rank, untouched until used. Collective. None, on all ranks,
    where they are not on one host or one of them cannot. Raises `PeerLost`.
    """
    if groups.device_type != "cpu" or not groups.is_single_node or groups.world_size == 1:
        return None
    calls, own = functions(), -1
    if calls is not None and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            own = os.memfd_create("moed", os.MFD_CLOEXEC)
            os.ftruncate(own, FLAG_BYTES + num_bytes)
    try:
        peers = _gather(groups, os.getpid(), own)
        channel = None
        if calls is not None and all(descriptor >= 0 for _, descriptor in peers):
            with contextlib.suppress(OSError):
                channel = HostChannel(groups, calls, own, peers)
        everyone = _gather(groups, int(channel is not None), 0)
    finally:
        if own >= 0:
            os.close(own)
    if all(is_open for is_open, _ in everyone):
        if channel is not None:
            groups.close_with(channel)
        return channel
    if channel is not None:
        channel.close()
    return None


def _gather(groups: Groups, first: int, second: int) -> list[tuple[int, int]]:
    """Every rank's two numbers."""
    gathered = torch.zeros(groups.world_size * 2, dtype=torch.int64)
    own = torch.tensor([first, second], dtype=torch.int64)
    with collective_errors("opening of shared memory"):
        dist.all_gather_single(gathered, own, group=groups.cpu)
    return [(int(a), int(b)) for a, b in gathered.view(-1, 2).tolist()]
