"""The process of one DP rank: join the group, start the engine, run it, and say why it ended."""

import contextlib
import faulthandler
import gc
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError, PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.server.heartbeats import Heartbeat
from moed.server.lifecycle import die_with_parent
from moed.server.logs import setup_logging
from moed.server.messages import PeerGone, RankFailure
from moed.server.orders import Orders
from moed.server.watchdog import STACKS_SIGNAL

if TYPE_CHECKING:
    from moed.dist.groups import Groups
    from moed.server.engine import Engine

logger = logging.getLogger(__name__)


def run_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    store_socket: socket.socket | None,
    channel_address: str,
    pipe: Connection,
    heartbeats: Any,
) -> None:
    """Target of a rank's process. Rank 0 receives the store's listening socket; a rank of a later
    epoch than 0 is told by the launcher when to join, and gets it then.

    Leaves with 0 after a group-wide stop; otherwise sends a `RankFailure` and leaves with its code.
    """
    die_with_parent()
    # A terminal's Ctrl-C reaches every process; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    server = config.server
    setup_logging(f"rank {environment.rank}", server.log_level, server.observability.log_format)
    orders = Orders(pipe, environment, channel_address)
    try:
        listen_fd = None if store_socket is None else store_socket.detach()
        heartbeat = None if heartbeats is None else Heartbeat(heartbeats, environment.rank)
        serve_epochs(config, environment, listen_fd, orders, heartbeat)
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        with contextlib.suppress(OSError):
            orders.tell(failure)
        sys.exit(failure.exit_code)


def serve_epochs(
    config: EngineConfig,
    environment: LaunchEnvironment,
    listen_fd: int | None,
    orders: Orders,
    heartbeat: Heartbeat | None,
) -> None:
    """Serve in one group after the other, as the launcher orders: weights and KV cache stay.
    Returns after a group-wide stop, raises what is this rank's own fault.
    """
    started = time.monotonic()
    # Heavy: torch comes in here, in the rank only.
    import torch

    torch.set_num_threads(config.parallel.num_threads)
    life = _Life(config, orders, heartbeat, {"import": time.monotonic() - started})
    place = environment
    if environment.epoch and config.stays_in_process:
        place, listen_fd = orders.await_join(environment)
    while not life.serve_group(place, listen_fd):
        # Errors held what was on the stack, and so the group's threads and buffers.
        gc.collect()
        place, listen_fd = orders.await_join(place)


class _Life:
    """A rank through all its groups."""

    def __init__(
        self,
        config: EngineConfig,
        orders: Orders,
        heartbeat: Heartbeat | None,
        phases: dict[str, float],
    ) -> None:
        """`phases`: seconds that its start has taken so far."""
        self._heartbeat = heartbeat
        self._config = config
        self._orders = orders
        self._phases = phases
        self._engine: Engine | None = None

    def serve_group(self, place: LaunchEnvironment, listen_fd: int | None) -> bool:
        """True after a group-wide stop, False when the group is lost and this rank is well."""
        orders = self._orders
        try:
            self._join(place, listen_fd).run()
            return True
        except Exception as error:
            orders.abort()
            is_own = not (isinstance(error, PeerLost) or orders.is_leaving)
            if is_own or not self._config.stays_in_process:
                raise
            logger.warning("leaving the group of epoch %d: %s", place.epoch, error)
            orders.tell(PeerGone(place.rank, place.epoch, str(error)))
            return False
        finally:
            if self._engine is not None:
                self._engine.leave()
            orders.let_go()

    def _join(self, place: LaunchEnvironment, listen_fd: int | None) -> "Engine":
        """The engine, ready in the group of `place.epoch`; `orders.let_go` closes the group."""
        from moed.dist.groups import init_groups
        from moed.server.channel import EngineChannel
        from moed.server.engine import Engine

        config, orders = self._config, self._orders
        started = time.monotonic()
        groups = init_groups(place, config.parallel, listen_fd)
        orders.hold(groups)
        phases = {**self._phases, "rendezvous": time.monotonic() - started}
        self._phases = {}
        channel = EngineChannel(orders.take_address(), place.rank, place.epoch, orders)
        orders.hold_channel(channel)
        if self._engine is None:
            self._engine = Engine(config, groups, channel, self._heartbeat)
            self._engine.start(phases)
        else:
            self._engine.rejoin(groups, channel, phases)
        return self._engine


def serve_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    listen_fd: int | None,
    channel_address: Callable[["Groups"], str],
) -> None:
    """Join, start, run: returns after a group-wide stop, raises what went wrong otherwise."""
    started = time.monotonic()
    # Heavy: torch comes in here, in the rank only.
    import torch

    from moed.dist.groups import init_groups
    from moed.server.channel import EngineChannel
    from moed.server.engine import Engine

    torch.set_num_threads(config.parallel.num_threads)
    imported = time.monotonic()
    groups = init_groups(environment, config.parallel, listen_fd)
    try:
        channel = EngineChannel(channel_address(groups), environment.rank, 0, None)
        try:
            phases = {"import": imported - started, "rendezvous": time.monotonic() - imported}
            engine = Engine(config, groups, channel, None)
            engine.start(phases)
            engine.run()
        finally:
            channel.close()
    finally:
        groups.close()


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
