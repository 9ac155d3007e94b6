"""What a CUDA graph cannot hold, noticed on any device: reads of values on the host, and tensors
made of the host's numbers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "bincount", "aten.equal.", "masked_select", "unique")


class HostRead(Exception):
    """A value was read, or put in, by the host."""


class _NothingOfTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(read in name for read in READS):
            raise HostRead(f"{name} waits for the device")
        # A graph would copy what was there at its recording, or refuse to.
        if "lift_fresh" in name:
            raise HostRead("a tensor comes from the host")
        return func(*args, **(kwargs or {}))


def _refuse(self: torch.Tensor) -> Any:
    raise HostRead("tolist waits for the device")


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """`HostRead` for whatever reads a tensor's values on the host, or makes one of its numbers."""
    mode = _NothingOfTheHost()  # type: ignore[no-untyped-call]
    with mode, mock.patch.object(torch.Tensor, "tolist", _refuse):
        yield
