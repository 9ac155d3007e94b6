"""The process groups of one rank, and how a lost peer becomes a sentence."""

import contextlib
import datetime
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from moed.config.engine_config import ParallelConfig
from moed.config.environ import set_default
from moed.config.errors import ConfigError, PeerLost
from moed.dist.hosts import loopback_name
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


class Closable(Protocol):
    """What waits for nobody when it closes."""

    def close(self) -> None: ...


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
        timeout_s: float,
    ) -> None:
        self.rank = environment.rank
        self.epoch = environment.epoch
        self.world_size = environment.world_size
        self.local_rank = environment.local_rank
        first = environment.rank - environment.local_rank
        self.local_ranks = range(first, first + environment.local_world_size)
        """Of this host."""
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
        self.is_single_node = environment.is_single_node
        """All ranks are on this host."""
        self.timeout_s = timeout_s
        """Bound on any one collective."""
        self._is_closed = False
        self._members: WeakSet[Closable] = WeakSet()
        self._sockets: dict[int, str] = {}

    @property
    def compute_device(self) -> torch.device:
        """Where this rank's tensors live: the GPU of its local rank, or the CPU."""
        return device_of(self.device_type, self.local_rank)

    def close_with(self, member: Closable) -> None:
        """Have `member`, if it still lives, closed before the group is left. It is not kept."""
        self._members.add(member)

    def own_sockets(self, sockets: dict[int, str]) -> None:
        """`sockets` are this group's: descriptors, each with what the kernel calls it."""
        self._sockets = sockets

    def abort(self) -> None:
        """Free a thread of this process that is in a collective, and peers that wait for this rank:
        they get an error at once. Waits for nobody; call it from any thread. Only `close` is of use
        afterwards.
        """
        for member in list(self._members):
            member.close()
        for backend in self._device_backends():
            with contextlib.suppress(RuntimeError):
                backend.abort()
        # gloo has nothing to call: it sees that its connections are closed.
        shut_down(self._sockets)

    def _device_backends(self) -> list[Any]:
        """What holds a GPU until it is aborted."""
        if self.device_type != "cuda":
            return []
        groups = {id(g): g for g in (self.device, self.agreement, self.tensor) if g is not None}
        found = []
        for group in groups.values():
            # A group may be of gloo alone.
            with contextlib.suppress(RuntimeError):
                found.append(group._get_backend(torch.device("cuda")))
        return found

    def close(self) -> None:
        """Leave the group, within `CLOSE_S`: a peer that is gone must not hold this rank. Safe to
        call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for member in list(self._members):
            member.close()
        _destroy_within_bound()
        # With them the store goes, and on rank 0 its port, whoever still knows of this object.
        del self.cpu, self.device, self.agreement, self.tensor


def open_sockets() -> dict[int, str]:
    """The sockets of this process; none where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def shut_down(sockets: dict[int, str]) -> None:
    """End the connections of those that are still what they were. Closes no descriptor."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    # gloo ends the process when one that listens is shut down.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _forgotten_on_failure() -> Iterator[None]:
    """Leave nothing of a group that comes to nothing. torch names a group by how many there were in
    the process since the last that was destroyed, and ranks find each other by that name: one that
    counts a failure which another rank, newly started, has not seen, would never find it.
    """
    try:
        yield
    except BaseException:
        if dist.is_initialized():
            _destroy_within_bound()
        _world.group_count = 0
        raise


def _destroy_within_bound() -> None:
    """A peer that is gone does not hold this rank."""
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


def device_of(device_type: str, local_rank: int) -> torch.device:
    """The device of a rank."""
    return torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")


def take_gpu(environment: LaunchEnvironment) -> torch.device:
    """Make the GPU of the local rank this process's current one, before anything is allocated.

    Raises `ConfigError` when this torch has no CUDA, or the node fewer GPUs than ranks.
    """
    local_rank, wanted = environment.local_rank, environment.local_world_size
    if torch.version.cuda is None:
        raise ConfigError(
            f"device is 'cuda', and the installed torch {torch.__version__} is built for CPUs; "
            "install a build with CUDA, or take --device cpu"
        )
    found = torch.cuda.device_count()
    if found < wanted:
        raise ConfigError(
            f"{wanted} ranks on this node need a GPU each, and torch finds {found} (see "
            f"CUDA_VISIBLE_DEVICES); start at most {found} here (--data-parallel-size x "
            "--tensor-parallel-size, or torchrun's --nproc-per-node), or take --device cpu"
        )
    device = device_of("cuda", local_rank)
    # What was allocated before would lie on the first GPU, for every rank.
    is_clean = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert is_clean or torch.cuda.current_device() == local_rank
    torch.cuda.set_device(device)
    return device


def init_groups(
    environment: LaunchEnvironment,
    parallel: ParallelConfig,
    store: Store,
    interface: str | None,
) -> Groups:
    """Join the other ranks, which have all met at the `store`. Collective. Where all are known to
    be here they get less than the timeout.

    `interface`: the network of what goes between nodes; None on one node. Raises `PeerLost` when
    the others do not come within `parallel.distributed_timeout_s`, `ConfigError` where there is no
    GPU for this rank.
    """
    whole = datetime.timedelta(seconds=parallel.distributed_timeout_s)
    timeout = datetime.timedelta(seconds=environment.patience_s(parallel.distributed_timeout_s))
    others = open_sockets()
    if environment.is_single_node:
        # Otherwise gloo resolves the host's name, which may lead anywhere, and listens there.
        set_default("GLOO_SOCKET_IFNAME", loopback_name())
    elif interface is not None:
        set_default("GLOO_SOCKET_IFNAME", interface)
        set_default("NCCL_SOCKET_IFNAME", interface)
    on_gpu = parallel.device == "cuda"
    device = take_gpu(environment) if on_gpu else None
    with collective_errors("rendezvous"), _forgotten_on_failure():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
            # NCCL then connects here, where it can fail with words, and on this GPU.
            device_id=device,
        )
        world = dist.group.WORLD
        assert world is not None
        agreement = world
        if on_gpu:
            # A second communicator: the agreement never waits behind the model's collectives.
            agreement = dist.new_group(timeout=timeout, backend=parallel.agreement_backend)
        tensor = _tensor_group(environment.rank, parallel, timeout)
        for group in (world, agreement, tensor):
            if group is not None:
                _set_pg_timeout(whole, group)
    size = parallel.tensor_parallel_size
    groups = Groups(
        environment,
        parallel.device,
        world,
        world,
        agreement,
        tensor,
        size,
        parallel.distributed_timeout_s,
    )
    found = open_sockets()
    groups.own_sockets({fd: name for fd, name in found.items() if others.get(fd) != name})
    return groups


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
