"""Which machines take part: what `--nnodes` and the settings beside it become."""

from dataclasses import dataclass, field

from moed.config.errors import ConfigError
from moed.config.keys import read_keys
from moed.config.settings import ServeSettings

MIN_TRANSPORT_KEY_CHARACTERS = 32


@dataclass(frozen=True)
class NodesConfig:
    """The nodes of a launch, and how they find and trust each other."""

    num_nodes: int
    node_rank: int
    """Of this node; the HTTP port is on node 0."""
    master_addr: str
    """Of the first node, where the ranks meet."""
    master_port: int
    host_interface: str | None
    """Network interface of everything between nodes; None: that of the route to the master."""
    rendezvous_timeout_s: float
    """How long a node waits for the others to come."""
    probe_port: int
    """Where the nodes other than the first answer probes."""
    transport_key: str | None = field(repr=False)
    """None: each launch makes one, which all see that reach the store."""

    @property
    def name(self) -> str:
        return f"node {self.node_rank}"


def nodes_config(settings: ServeSettings) -> NodesConfig | None:
    """None where everything is on one node. Raises `ConfigError`."""
    if settings.nnodes == 1:
        _refuse_without_nodes(settings)
        return None
    if settings.node_rank >= settings.nnodes:
        raise ConfigError(
            f"node_rank is {settings.node_rank}, and nnodes is {settings.nnodes}: nodes count from "
            f"0 to {settings.nnodes - 1}"
        )
    if settings.master_addr is None:
        raise ConfigError(
            f"nnodes is {settings.nnodes}, and master_addr is not given: name the first node's "
            "address, the same on all nodes, with --master-addr"
        )
    num_ranks = settings.data_parallel_size * settings.tensor_parallel_size
    if num_ranks % settings.nnodes:
        raise ConfigError(
            f"data_parallel_size {settings.data_parallel_size} x tensor_parallel_size "
            f"{settings.tensor_parallel_size} are {num_ranks} ranks, which do not divide evenly "
            f"over nnodes {settings.nnodes}"
        )
    port = settings.port if settings.probe_port is None else settings.probe_port
    return NodesConfig(
        num_nodes=settings.nnodes,
        node_rank=settings.node_rank,
        master_addr=settings.master_addr,
        master_port=settings.master_port,
        host_interface=settings.host_interface,
        rendezvous_timeout_s=settings.rendezvous_timeout,
        probe_port=port,
        transport_key=_transport_key(settings),
    )


def _refuse_without_nodes(settings: ServeSettings) -> None:
    """What has no meaning on one node is more likely a forgotten --nnodes."""
    if settings.node_rank:
        raise ConfigError(
            f"node_rank is {settings.node_rank}, and nnodes is 1: say how many nodes there are "
            "with --nnodes"
        )
    if settings.master_addr is not None:
        raise ConfigError(
            f"master_addr is {settings.master_addr!r}, and nnodes is 1: say how many nodes there "
            "are with --nnodes"
        )


def _transport_key(settings: ServeSettings) -> str | None:
    key = settings.transport_key
    if settings.transport_key_file is not None:
        if key is not None:
            raise ConfigError(
                "MOED_TRANSPORT_KEY and transport_key_file are both given: keep one of them"
            )
        keys = read_keys(settings.transport_key_file)
        if len(keys) > 1:
            raise ConfigError(
                f"the transport key file {settings.transport_key_file} holds {len(keys)} keys; "
                "write one, the same on all nodes"
            )
        key = keys[0]
    if key is not None and len(key) < MIN_TRANSPORT_KEY_CHARACTERS:
        raise ConfigError(
            f"the transport key has {len(key)} characters, and at least "
            f"{MIN_TRANSPORT_KEY_CHARACTERS} random ones are asked for (openssl rand -hex 32)"
        )
    return key
