"""A rank among the nodes: it meets the ranks of all of them, and lets its node's keeper know."""

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, MoedError, PeerLost
from moed.config.model import describe_weights
from moed.config.versions import compared_versions
from moed.dist.hosts import host_identity, interface_of, own_address
from moed.dist.launch import LaunchEnvironment
from moed.server.node_messages import Joined, RanksReady
from moed.server.wire import Wire, key_fingerprint, wire_from

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from moed.dist.rendezvous import Meeting

logger = logging.getLogger(__name__)

# What rank 0 tells of a front end that has seen other groups, where no launcher knows of it.
EPOCH = "epoch"
# How long a rank that cannot start looks for the others, to tell them.
TELL_FAILURE_S = 10.0


@dataclass(frozen=True)
class Met:
    """What a rank needs to join the others, once it has met them."""

    environment: LaunchEnvironment
    """With the local ranks as found by host."""
    store: "Store"
    interface: str | None
    """Of what goes between nodes; None on one host."""
    wire: Wire


class NodeOfRank:
    """What a rank has to do with the other nodes."""

    def __init__(
        self,
        config: EngineConfig,
        environment: LaunchEnvironment,
        told: Mapping[str, str],
        tell_keeper: Callable[[Joined | RanksReady], None] | None,
    ) -> None:
        """`told`: on rank 0, what all others need to know. `tell_keeper`: on the first rank of a
        node that has a keeper.
        """
        self._config = config
        self._environment = environment
        self._told = dict(told)
        self._tell_keeper = tell_keeper
        self.is_ready = False
        """Since this rank has done a real step with all others."""

    def meet(
        self,
        place: LaunchEnvironment,
        listen_fd: int | None,
        check: Callable[[], None] | None,
    ) -> Met:
        """Find the others at the store. `check` is called meanwhile, and raises to give up.

        Raises `PeerLost`, `RankMismatch` or `ConfigError`.
        """
        from moed.dist.rendezvous import Introduction, find_others

        config, timeout_s = self._config, self._timeout_s(place)
        items = config.agreement_items() | compared_versions()
        items["*.safetensors"] = describe_weights(config.model)
        items["transport_key"] = key_fingerprint(config.nodes)
        own = Introduction(host_identity(), socket.gethostname(), items, self._told)
        store, meeting = find_others(place, listen_fd, own, timeout_s, check)
        wire = wire_from(meeting.told, config.nodes)
        epoch = int(meeting.told.get(EPOCH, place.epoch))
        interface = check_network(config, meeting)
        self._tell_keeper_of(wire)
        return Met(replace(meeting.environment, epoch=epoch), store, interface, wire)

    def _timeout_s(self, place: LaunchEnvironment) -> float:
        nodes, timeout_s = self._config.nodes, self._config.parallel.distributed_timeout_s
        return place.patience_s(timeout_s if nodes is None else nodes.rendezvous_timeout_s)

    def _tell_keeper_of(self, wire: Wire) -> None:
        nodes = self._config.nodes
        if self._tell_keeper is None or nodes is None:
            return
        assert wire.secret is not None
        first, size = self._environment.rank, self._environment.local_world_size
        self._tell_keeper(
            Joined(
                node=nodes.node_rank,
                name=socket.gethostname(),
                ranks=list(range(first, first + size)),
                address=wire.address,
                secret=wire.secret,
            )
        )

    def on_ready(self) -> None:
        """This rank has done a real step with all others."""
        self.is_ready = True
        if self._tell_keeper is not None:
            self._tell_keeper(RanksReady())


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
