"""The process groups of one rank, and how a lost peer becomes a sentence."""

import contextlib
import datetime
import logging
import threading
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moed.config.engine_config import ParallelConfig
from moed.config.environ import set_default
from moed.config.errors import PeerLost
from moed.dist.launch import LaunchEnvironment

logger = logging.getLogger(__name__)

CLOSE_S = 5.0


@contextlib.contextmanager
def collective_errors(what: str) -> Iterator[None]:
    """Turn what gloo or NCCL raises inside into `PeerLost`, naming the collective `what`."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).split("\n")[0][:300]
        raise PeerLost(
            f"the collective {what!r} failed, most likely because another rank ended or hangs: "
            f"look for that rank's own error first. Reason: {reason}"
        ) from error


class Groups:
    """This rank's communicators. `cpu` is gloo; `device` is NCCL on GPUs, else the same gloo."""

    def __init__(
        self,
        environment: LaunchEnvironment,
        device_type: str,
        cpu: dist.ProcessGroup,
        device: dist.ProcessGroup,
        agreement: dist.ProcessGroup,
        tensor: dist.ProcessGroup | None,
        tensor_size: int,
    ) -> None:
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.local_rank = environment.local_rank
        self.device_type = device_type
        self.cpu = cpu
        self.device = device
        self.agreement = agreement
        """For the agreement alone, so that it never queues behind a model's collectives."""
        self.tensor = tensor
        """The processes of this DP rank, on either device; None when it is one alone."""
        self.tensor_size = tensor_size
        self.tensor_rank = environment.rank % tensor_size
        self.data_parallel_rank = environment.rank // tensor_size
        self._is_closed = False

    def close(self) -> None:
        """Leave the group, within `CLOSE_S`: a peer that is gone must not hold this rank. Safe to
        call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        closing = threading.Thread(target=_destroy, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            logger.warning("the process group did not close within %g s", CLOSE_S)


def _destroy() -> None:
    try:
        dist.destroy_process_group()
    except (RuntimeError, AssertionError) as error:
        logger.warning("the process group did not close cleanly: %s", error)


def init_groups(
    environment: LaunchEnvironment, parallel: ParallelConfig, listen_fd: int | None
) -> Groups:
    """Meet the other ranks. Collective.

    `listen_fd`: on rank 0 of our own launcher, the bound socket of the store; else None. Raises
    `PeerLost` when the others do not come within `parallel.distributed_timeout_s`.
    """
    timeout = datetime.timedelta(seconds=parallel.distributed_timeout_s)
    if environment.is_single_node:
        # Otherwise gloo resolves the host's name, which may lead anywhere, and listens there.
        set_default("GLOO_SOCKET_IFNAME", _loopback_name())
    on_gpu = parallel.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(environment.local_rank)
    with collective_errors("rendezvous"):
        if environment.launcher == "torchrun":
            store = None  # the agent's, which the env:// method finds
        else:
            store = TCPStore(
                environment.store_host,
                environment.store_port,
                environment.world_size,
                environment.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listen_fd,
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
            device_id=torch.device("cuda", environment.local_rank) if on_gpu else None,
        )
        world = dist.group.WORLD
        assert world is not None
        # A second communicator, so that the agreement never waits behind the model's collectives.
        agreement = dist.new_group(timeout=timeout, backend="nccl") if on_gpu else world
        tensor = _tensor_group(environment.rank, parallel, timeout)
    size = parallel.tensor_parallel_size
    return Groups(environment, parallel.device, world, world, agreement, tensor, size)


def _tensor_group(
    rank: int, parallel: ParallelConfig, timeout: datetime.timedelta
) -> dist.ProcessGroup | None:
    """Collective: every process makes every group, in the same order."""
    size, own = parallel.tensor_parallel_size, None
    if size == 1:
        return None
    for first in range(0, parallel.world_size, size):
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=timeout)
        if rank in members:
            own = group
    return own


def _loopback_name() -> str:
    """The interface of 127.0.0.1: `lo` on Linux, `lo0` on macOS."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
