"""`moed serve` on several nodes, as started by hand or by torchrun."""

import socket
import sys
from collections.abc import Mapping, Sequence

from tests.daemon import Daemon
from tests.e2e.two_hosts import Host

TORCHRUN = ("-m", "torch.distributed.run")


def free_port() -> int:
    """A port of this machine's loopback that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Node(Daemon):
    """One of `num_nodes`, all on loopback; `host` is where it runs."""

    def __init__(
        self,
        node_rank: int,
        port: int,
        *arguments: str,
        num_nodes: int = 2,
        ranks: int = 2,
        address: str = "127.0.0.1",
        host: Host | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        place = {
            "--nnodes": str(num_nodes),
            "--node-rank": str(node_rank),
            "--master-addr": address,
            "--master-port": str(port),
            "--probe-port": "0",
        }
        super().__init__(
            *[word for pair in place.items() for word in pair],
            *arguments,
            ranks=ranks,
            environment=environment,
            command=command_on(host, "-m", "moed.server"),
        )


class TorchrunNode(Daemon):
    """One node of torchrun with one rank each: the same line on every node."""

    def __init__(
        self, port: int, *arguments: str, address: str = "127.0.0.1", host: Host | None = None
    ) -> None:
        agent = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        agent += ["--rdzv-endpoint", f"{address}:{port}", "-m", "moed.server"]
        super().__init__("--probe-port", "0", *arguments, command=command_on(host, *agent))


def command_on(host: Host | None, *arguments: str) -> Sequence[str]:
    """The command line of `python arguments…`, here or on `host`."""
    return (sys.executable, *arguments) if host is None else host.command(*arguments)
