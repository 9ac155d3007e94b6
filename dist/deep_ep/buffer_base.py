"""What both halves of the stand-in's `Buffer` share: construction and the end."""

from typing import Any, ClassVar

import torch.distributed as dist

from moed.config import deep_ep_limits as limits
from moed.config.environ import environment
from moed.dist.deep_ep.events import EventHandle, EventOverlap
from moed.dist.deep_ep.high_throughput import HighThroughput
from moed.dist.deep_ep.low_latency import LowLatency
from moed.dist.deep_ep.rules import Mode, Rules, Shape, require
from moed.dist.deep_ep.wire import Call, Scrambler, Wire

NO_SHAPE = Shape(0, 0, 0, 0)


class BufferBase:
    """See `moed.dist.deep_ep.buffer.Buffer`."""

    rules: ClassVar[Rules] = Rules(Mode.STRICT)
    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Collective over `group`. `NVSHMEM_QP_DEPTH` counts as it stands now."""
        require(group is not None, "the stand-in works over a torch.distributed group only")
        assert group is not None
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._num_qps = num_qps_per_rank
        depth = environment().get("NVSHMEM_QP_DEPTH", limits.DEFAULT_QP_DEPTH)
        self.nvshmem_qp_depth = int(depth)
        _check_bytes(self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        require(num_qps_per_rank > 0, f"num_qps_per_rank is {num_qps_per_rank}")
        self._is_destroyed = False
        self._wire = Wire(group)
        scrambler = Scrambler(self.rank)
        self._low_latency = LowLatency(self._wire, scrambler)
        self._high_throughput = HighThroughput(self._wire, scrambler)
        form = low_latency_mode + 2 * enable_shrink + 4 * (num_nvl_bytes + num_rdma_bytes)
        self._wire.announce(Call.BUFFER, NO_SHAPE, form)

    def destroy(self) -> None:
        """Collective; once, and only with `explicitly_destroy`."""
        require(self.explicitly_destroy, "destroy() needs explicitly_destroy=True")
        self._check_alive()
        self._low_latency.order.check_received("destroy")
        self._wire.announce(Call.DESTROY, NO_SHAPE, 0)
        self._is_destroyed = True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors of the high-throughput calls, for all buffers."""
        require(new_num_sms % 2 == 0, f"num_sms {new_num_sms} must be even")
        BufferBase.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event that has passed."""
        return EventOverlap(EventHandle())

    def _check_alive(self) -> None:
        require(not self._is_destroyed, "the buffer is destroyed")


def _check_bytes(num_ranks: int, nvl: int, rdma: int, low_latency_mode: bool) -> None:
    """What DeepEP's constructor refuses."""
    for what, size in (("num_nvl_bytes", nvl), ("num_rdma_bytes", rdma)):
        require(
            0 <= size < limits.MAX_BUFFER_BYTES and size % limits.BYTES_MULTIPLE == 0,
            f"{what} is {size}: it must be a multiple of {limits.BYTES_MULTIPLE} below "
            f"{limits.MAX_BUFFER_BYTES}",
        )
    most = limits.MAX_INDEXED_BYTES
    require(nvl <= most or rdma == 0, f"num_nvl_bytes is {nvl}, with RDMA at most {most}")
    require(low_latency_mode or rdma <= most, f"num_rdma_bytes is {rdma}, at most {most}")
    node = limits.GPUS_PER_NODE
    require(
        rdma == 0 or num_ranks > node or low_latency_mode,
        f"num_rdma_bytes is {rdma} on one node without low_latency_mode: it must be 0",
    )
    most_ranks = max(limits.HIGH_THROUGHPUT_RANKS)
    require(
        num_ranks <= most_ranks or low_latency_mode,
        f"{num_ranks} ranks without low_latency_mode, at most {most_ranks}",
    )
    require(
        num_ranks < node or num_ranks % node == 0,
        f"{num_ranks} ranks across nodes: it must be a multiple of {node}",
    )
