"""The process of one rank: meet the others, start the engine, run it, and say why it ended."""

import contextlib
import logging
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, MoedError, PeerLost
from moed.config.versions import compared_versions
from moed.dist.hosts import host_identity, interface_of, own_address
from moed.dist.launch import LaunchEnvironment
from moed.server.keeper_process import KeeperProcess
from moed.server.lifecycle import die_with_parent, leave
from moed.server.logs import setup_logging
from moed.server.messages import Joined, NodeStopping, RankFailure, RanksReady
from moed.server.wire import key_fingerprint, wire_from

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from moed.dist.rendezvous import Meeting

logger = logging.getLogger(__name__)

# How long a rank that cannot start looks for the others, to tell them.
TELL_FAILURE_S = 10.0
STOPPED_BY_SIGTERM = 128 + signal.SIGTERM

FailureHandler = Callable[[RankFailure], None]


def run_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    store_socket: socket.socket | None,
    told: Mapping[str, str],
    failures: Connection,
) -> None:
    """Target of a rank's process. Rank 0 receives the store's listening socket, and what to tell
    the others of the front end.

    Leaves with 0 after a group-wide stop; otherwise sends a `RankFailure` and leaves with its code.
    """
    die_with_parent()
    # A terminal's Ctrl-C reaches every process; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = config.server
    setup_logging(f"rank {environment.rank}", server.log_level, server.observability.log_format)

    def on_failure(failure: RankFailure) -> None:
        failures.send_bytes(msgspec.msgpack.encode(failure))

    listen_fd = None if store_socket is None else store_socket.detach()
    try:
        RankProcess(config, environment, listen_fd, told, on_failure).serve()
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        on_failure(failure)
        leave(failure.exit_code)
    leave(0)


class RankProcess:
    """One rank, and on the first one of a node without the front end, that node's keeper."""

    def __init__(
        self,
        config: EngineConfig,
        environment: LaunchEnvironment,
        listen_fd: int | None,
        told: Mapping[str, str],
        on_failure: FailureHandler,
    ) -> None:
        self._config = config
        self._environment = environment
        self._listen_fd = listen_fd
        self._told = dict(told)
        self._on_failure = on_failure
        self._keeper: KeeperProcess | None = None
        self._is_ready = False

    def serve(self) -> None:
        """Meet, start, run: returns after a group-wide stop, raises what went wrong otherwise."""
        nodes = self._config.nodes
        if nodes is not None and nodes.node_rank and self._environment.local_rank == 0:
            try:
                self._keeper = KeeperProcess(self._config, self._lose_link)
            except MoedError as error:
                tell_others(self._environment, self._environment.local_world_size, error)
                raise
        try:
            self._serve()
        finally:
            if self._keeper is not None:
                self._keeper.close()

    def _serve(self) -> None:
        started = time.monotonic()
        # Heavy: torch comes in here, in the rank only.
        import torch

        from moed.dist.groups import init_groups
        from moed.server.channel import EngineChannel
        from moed.server.engine import Engine

        config = self._config
        torch.set_num_threads(config.parallel.num_threads)
        imported = time.monotonic()
        store, meeting = self._meet()
        interface = check_network(config, meeting)
        wire = wire_from(meeting.told, config.nodes)
        self._tell_keeper_of(meeting)
        groups = init_groups(meeting.environment, config.parallel, store, interface)
        try:
            channel = EngineChannel(wire, self._environment.rank)
            try:
                phases = {"import": imported - started, "rendezvous": time.monotonic() - imported}
                engine = Engine(config, groups, channel)
                engine.start(phases)
                self._is_ready = True
                if self._keeper is not None:
                    self._keeper.tell(RanksReady())
                engine.run()
            finally:
                channel.close()
        finally:
            groups.close()

    def _meet(self) -> "tuple[Store, Meeting]":
        from moed.dist.rendezvous import Introduction, meet, open_store

        config, environment = self._config, self._environment
        timeout_s = rendezvous_timeout_s(config)
        store = open_store(environment, self._listen_fd, timeout_s)
        items = config.agreement_items() | compared_versions()
        items["transport_key"] = key_fingerprint(config.nodes)
        own = Introduction(host_identity(), socket.gethostname(), items, self._told)
        return store, meet(store, environment, own, timeout_s)

    # The node ------------------------------------------------------------------------------------

    def _tell_keeper_of(self, meeting: "Meeting") -> None:
        nodes = self._config.nodes
        if self._keeper is None or nodes is None:
            return
        wire = wire_from(meeting.told, nodes)
        assert wire.secret is not None
        first, size = self._environment.rank, self._environment.local_world_size
        self._keeper.tell(
            Joined(
                node=nodes.node_rank,
                name=socket.gethostname(),
                ranks=list(range(first, first + size)),
                address=wire.address,
                secret=wire.secret,
            )
        )

    def _lose_link(self, error: str) -> None:
        """In the thread that hears the keeper: the ranks may be stuck in a collective for long."""
        logger.error("%s", error)
        rank, exit_code = self._environment.rank, PeerLost.exit_code
        self._on_failure(
            RankFailure(
                rank=rank, error=error, details="", is_consequence=False, exit_code=exit_code
            )
        )
        leave(exit_code)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Under a launcher that signals each rank: the front end stops all ranks together."""
        if not self._is_ready:
            leave(STOPPED_BY_SIGTERM)
        if self._keeper is not None:
            self._keeper.tell(NodeStopping())


def rendezvous_timeout_s(config: EngineConfig) -> float:
    """How long a rank waits for the others to come."""
    nodes = config.nodes
    return config.parallel.distributed_timeout_s if nodes is None else nodes.rendezvous_timeout_s


def check_network(config: EngineConfig, meeting: "Meeting") -> str | None:
    """The interface of what goes between nodes; None on one host. Raises `ConfigError` where the
    first node listens on its loopback.
    """
    environment, nodes = meeting.environment, config.nodes
    if nodes is None or environment.is_single_node:
        return None
    address = meeting.told["address"]
    if address.startswith(("tcp://127.", "tcp://[::1]")):
        raise ConfigError(
            f"the first node, {meeting.nodes[0].name}, takes {address} for its address, which "
            "other nodes cannot reach: name its network there with --host-interface"
        )
    own = own_address(nodes.host_interface, environment.store_host, environment.store_port)
    return nodes.host_interface or interface_of(own)


def tell_others(environment: LaunchEnvironment, num_ranks: int, error: MoedError) -> None:
    """Let the ranks of other nodes know why `num_ranks` of this one will not come, if the others
    can be reached soon.
    """
    from moed.dist.rendezvous import open_store, tell_failure

    # Nobody hosts the store in order to say that it has failed.
    if environment.rank == 0:
        return
    with contextlib.suppress(PeerLost):
        store = open_store(environment, None, TELL_FAILURE_S)
        node = environment.rank // environment.local_world_size
        tell_failure(store, f"node {node} ({socket.gethostname()})", num_ranks, error)


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
