"""The process of one rank: meet the others, start the engine, run it, and say why it ended."""

import contextlib
import faulthandler
import gc
import logging
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError, PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.server.heartbeats import Heartbeat
from moed.server.lifecycle import die_with_parent, leave
from moed.server.logs import setup_logging
from moed.server.messages import FromRank, PeerGone, RankFailure
from moed.server.node_of_rank import NodeOfRank
from moed.server.orders import Holder, Orders
from moed.server.watchdog import STACKS_SIGNAL

if TYPE_CHECKING:
    from moed.server.engine import Engine

logger = logging.getLogger(__name__)


def run_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    store_socket: socket.socket | None,
    told: Mapping[str, str],
    pipe: Connection,
    heartbeats: Any,
) -> None:
    """Target of a rank's process. Rank 0 receives the store's listening socket, and what to tell
    the others of the front end; a rank of a later epoch than 0 is told by the launcher when to
    join, and gets the socket then.

    Leaves with 0 after a group-wide stop; otherwise sends a `RankFailure` and leaves with its code.
    """
    die_with_parent()
    # A terminal's Ctrl-C reaches every process; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    server = config.server
    setup_logging(f"rank {environment.rank}", server.log_level, server.observability.log_format)
    orders = Orders(pipe, environment, told.get("address", ""))

    def tell(message: FromRank) -> None:
        with contextlib.suppress(OSError):
            orders.tell(message)

    nodes = config.nodes
    has_keeper = nodes is not None and nodes.node_rank > 0 and environment.local_rank == 0
    node = NodeOfRank(config, environment, told, tell if has_keeper else None)
    if nodes is not None:
        # Whoever asks a node to stop asks all of its processes, maybe: all nodes leave together.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        listen_fd = None if store_socket is None else store_socket.detach()
        heartbeat = None if heartbeats is None else Heartbeat(heartbeats, environment.rank)
        serve_epochs(config, environment, listen_fd, orders, heartbeat, node)
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        tell(failure)
        leave(failure.exit_code)
    leave(0)


def serve_epochs(
    config: EngineConfig,
    environment: LaunchEnvironment,
    listen_fd: int | None,
    orders: Orders,
    heartbeat: Heartbeat | None,
    node: NodeOfRank,
) -> None:
    """Serve in one group after the other, as the launcher orders: weights and KV cache stay.
    Returns after a group-wide stop, raises what is this rank's own fault.
    """
    life = _Life(config, orders, heartbeat, node)
    place = environment
    if environment.epoch and config.stays_in_process:
        place, listen_fd = orders.await_join(environment)
    while not _serve_group(life, orders, place, listen_fd):
        # Errors held what was on the stack, and so the group's threads and buffers.
        gc.collect()
        place, listen_fd = orders.await_join(place)


def _serve_group(
    life: "_Life", orders: Orders, place: LaunchEnvironment, listen_fd: int | None
) -> bool:
    """True after a group-wide stop, False when the group is lost and this rank is well."""
    try:
        life.join(place, listen_fd, orders).run()
        return True
    except Exception as error:
        orders.abort()
        is_own = not (isinstance(error, PeerLost) or orders.is_leaving)
        if is_own or not life.stays_after_loss(place):
            raise
        logger.warning("leaving the group of epoch %d: %s", place.epoch, error)
        orders.tell(PeerGone(place.rank, place.epoch, str(error)))
        return False
    finally:
        life.leave_group()
        orders.let_go()


def serve_rank(config: EngineConfig, environment: LaunchEnvironment, node: NodeOfRank) -> None:
    """Under a launcher that forms no group anew: join, start, run. Returns after a group-wide stop,
    raises what went wrong otherwise.
    """
    holder = Holder()
    try:
        _Life(config, holder, None, node).join(environment, None, None).run()
    finally:
        holder.let_go()


class _Life:
    """A rank through all its groups."""

    def __init__(
        self,
        config: EngineConfig,
        holder: Holder,
        heartbeat: Heartbeat | None,
        node: NodeOfRank,
    ) -> None:
        started = time.monotonic()
        # Heavy: torch comes in here, in the rank only.
        import torch

        torch.set_num_threads(config.parallel.num_threads)
        self.config = config
        self._heartbeat = heartbeat
        self._holder = holder
        self._node = node
        self._phases = {"import": time.monotonic() - started}
        self._engine: Engine | None = None

    def join(
        self, place: LaunchEnvironment, listen_fd: int | None, orders: Orders | None
    ) -> "Engine":
        """The engine, ready in the group of `place.epoch`; the holder's `let_go` closes the
        group.
        """
        from moed.dist.groups import init_groups
        from moed.server.channel import EngineChannel
        from moed.server.engine import Engine

        config, holder = self.config, self._holder
        started = time.monotonic()
        met = self._node.meet(place, listen_fd, None if orders is None else orders.check)
        groups = init_groups(met.environment, config.parallel, met.store, met.interface)
        holder.hold(groups)
        phases = {**self._phases, "rendezvous": time.monotonic() - started}
        self._phases = {}
        wire = met.wire if orders is None else orders.take_wire(met.wire)
        channel = EngineChannel(wire, place.rank, met.environment.epoch, orders)
        holder.hold_channel(channel)
        if self._engine is None:
            self._engine = Engine(config, groups, channel, self._heartbeat)
            self._engine.start(phases)
        else:
            self._engine.rejoin(groups, channel, phases)
        self._node.on_ready()
        return self._engine

    def stays_after_loss(self, place: LaunchEnvironment) -> bool:
        """Of the group of `place`: not where no group has ever been ready, and nobody waits."""
        return self.config.stays_in_process and (place.epoch > 0 or self._node.is_ready)

    def leave_group(self) -> None:
        if self._engine is not None:
            self._engine.leave()


def describe_failure(rank: int, error: BaseException) -> RankFailure:
    """The rank's last words: a known fault in one paragraph, our own with its traceback."""
    expected = isinstance(error, MoedError)
    return RankFailure(
        rank=rank,
        error=str(error) if expected else f"{type(error).__name__}: {error}",
        details="" if expected else "".join(traceback.format_exception(error)),
        is_consequence=isinstance(error, PeerLost),
        exit_code=error.exit_code if isinstance(error, MoedError) else 70,
    )
