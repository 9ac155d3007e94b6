"""How the records of a step's agreement travel: from the host through memory that ranks share or
over gloo, or over NCCL.

Legend: R ranks, F fields of a record.
"""

from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from moed.dist.groups import Groups
from moed.dist.host.channel import HostChannel, open_channel


class RecordExchange(Protocol):
    """Holds its buffers, so that a step allocates nothing for it."""

    def exchange(self, own: list[int]) -> list[list[int]]:
        """[R, F]: the records of all ranks, for the `own` [F]. One collective, at whose end the
        host waits. Raises what the collective raises.
        """
        ...


def make_exchange(groups: Groups, backend: str, num_fields: int) -> RecordExchange:
    """`backend`: "gloo", which shared memory stands for on one host, or "nccl". Collective."""
    if backend == "nccl":
        return DeviceExchange(groups, num_fields, groups.compute_device)
    channel = open_channel(groups, 2 * num_fields * torch.int64.itemsize)
    if channel is not None:
        return SharedExchange(groups, num_fields, channel)
    return HostExchange(groups, num_fields)


class SharedExchange:
    """Through memory that the ranks of one host share."""

    def __init__(self, groups: Groups, num_fields: int, channel: HostChannel) -> None:
        self._channel = channel
        self._own = np.zeros(num_fields, dtype=np.int64)
        self._all = np.zeros((groups.world_size, num_fields), dtype=np.int64)
        self._arguments = (self._own.ctypes.data, num_fields, self._all.ctypes.data)

    def exchange(self, own: list[int]) -> list[list[int]]:
        """See `RecordExchange.exchange`."""
        self._own[:] = own
        self._channel.run(self._channel.calls.exchange_records, *self._arguments)
        rows: list[list[int]] = self._all.tolist()
        return rows


class HostExchange:
    """Over gloo: the host alone takes part, whatever the GPU is doing."""

    def __init__(self, groups: Groups, num_fields: int) -> None:
        self._group = groups.agreement
        # The own record, once for each receiver.
        self._own = torch.zeros(groups.world_size, num_fields, dtype=torch.int64)
        self._own_fields = self._own.numpy()
        self._all = torch.zeros_like(self._own)

    def exchange(self, own: list[int]) -> list[list[int]]:
        """See `RecordExchange.exchange`."""
        self._own_fields[:] = own
        # An all-gather; gloo does it a third faster as an all-to-all.
        dist.all_to_all_single(self._all, self._own, group=self._group)
        rows: list[list[int]] = self._all.tolist()
        return rows


class DeviceExchange:
    """Over NCCL: on a stream of its own, between buffers in pinned memory."""

    def __init__(self, groups: Groups, num_fields: int, device: torch.device) -> None:
        self._group = groups.agreement
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_here = torch.cuda.Event()  # type: ignore[no-untyped-call]
        shape = (groups.world_size, num_fields)
        self._own = pinned_zeros(shape)
        self._own_fields = self._own.numpy()
        self._received = pinned_zeros(shape)
        self._own_on_device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._all_on_device = torch.zeros_like(self._own_on_device)

    def exchange(self, own: list[int]) -> list[list[int]]:
        """See `RecordExchange.exchange`."""
        self._own_fields[:] = own
        # Behind the step before it: kernels of two communicators that wait for peers at the same
        # time could keep each other from running, in another order on each rank.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._own_on_device.copy_(self._own, non_blocking=True)
            dist.all_to_all_single(self._all_on_device, self._own_on_device, group=self._group)
            self._received.copy_(self._all_on_device, non_blocking=True)
            self._is_here.record()
        self._is_here.synchronize()
        rows: list[list[int]] = self._received.tolist()
        return rows


def pinned_zeros(shape: tuple[int, int]) -> torch.Tensor:
    """int64 on the host, where the GPU can copy to and from without a stop in between."""
    return torch.zeros(shape, dtype=torch.int64, pin_memory=True)
