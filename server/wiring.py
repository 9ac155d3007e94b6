"""The listening sockets of the first node, bound before anything else starts, and who is started
where.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.dist.hosts import own_address
from moed.dist.launch import LaunchEnvironment
from moed.server.lifecycle import FrontendPlace
from moed.server.socket_folder import socket_folder
from moed.server.wire import Wire, make_wire

LOOPBACK = "127.0.0.1"
IPC = "ipc://"


@dataclass(frozen=True)
class Wiring:
    """How engines reach the front end."""

    wire: Wire
    """Of the first front end."""
    listener: socket.socket | None
    """Bound to the address of a wire between nodes."""
    told: Mapping[str, str]
    """For rank 0, which tells the others: of the first front end."""

    def place(self, number: int, epoch: int) -> FrontendPlace:
        """Of the front end that `number` others came before: between nodes it listens where they
        did.
        """
        if self.listener is not None:
            return FrontendPlace(self.wire, number, epoch, self.listener)
        if number:
            # A full disk has room for its socket once that of the one before is gone.
            with contextlib.suppress(OSError):
                os.unlink(f"{self.wire.address.removeprefix(IPC)}-{number - 1}")
        return FrontendPlace(Wire(f"{self.wire.address}-{number}"), number, epoch)


@contextlib.contextmanager
def open_wire(config: EngineConfig) -> Iterator[Wiring]:
    """On one node a socket in a folder that only this user can enter; else a port on the chosen
    network. Raises `ConfigError` where there is no such folder or network.
    """
    nodes = config.nodes
    if nodes is None:
        with socket_folder() as folder:
            wire, told = make_wire(f"{IPC}{folder}/engines", None)
            yield Wiring(wire, None, {"address": f"{told['address']}-0"})
        return
    host = own_address(nodes.host_interface, nodes.master_addr, nodes.master_port)
    with socket.create_server((host, 0), family=_family(host), backlog=512) as listener:
        port = listener.getsockname()[1]
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        wire, told = make_wire(address, nodes)
        yield Wiring(wire, listener, told)


def bind_store(config: EngineConfig, epoch: int) -> socket.socket:
    """Where the ranks of `epoch` meet: of the first one, on the port that all nodes were given, and
    later on one that only those are told of who belong there. Raises `ConfigError` for a taken
    port, or an address of another machine.
    """
    nodes, backlog = config.nodes, config.parallel.world_size + 8
    if nodes is None:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    host, port = nodes.master_addr, 0 if epoch else nodes.master_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address = str(found[4][0])
        _refuse_hidden_loopback(host, address)
        return socket.create_server((address, port), family=found[0], backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"the first node cannot listen on {host} port {port}, where the ranks meet: "
            f"{error.strerror}. --master-addr must be an address of this machine, and "
            "--master-port free on it; give the same to all nodes."
        ) from None


def _refuse_hidden_loopback(host: str, address: str) -> None:
    is_named = host == "localhost" or host == address
    if ipaddress.ip_address(address).is_loopback and not is_named:
        raise ConfigError(
            f"master_addr {host!r} is {address} on the first node itself, where other nodes cannot "
            "reach it; give its address in their network with --master-addr"
        )


def local_environment(
    config: EngineConfig, local_rank: int, store_port: int | None, epoch: int
) -> LaunchEnvironment:
    """Of a rank that the launcher of this node starts. `store_port`: where the ranks meet; None:
    where the settings say, or they will be told.
    """
    nodes, num_local = config.nodes, config.parallel.num_local_ranks
    first = 0 if nodes is None else nodes.node_rank * num_local
    port = 0 if nodes is None else nodes.master_port
    return LaunchEnvironment(
        rank=first + local_rank,
        world_size=config.parallel.world_size,
        local_rank=local_rank,
        local_world_size=num_local,
        store_host=LOOPBACK if nodes is None else nodes.master_addr,
        store_port=port if store_port is None else store_port,
        launcher="moed",
        epoch=epoch,
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
