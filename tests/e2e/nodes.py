"""Daemons of several nodes on this machine: all on its loopback, or each on a host of its own."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import httpx
import psutil

from tests.daemon import START_S, Daemon, free_port

PROBES = re.compile(r"probes on (http://\S+)/readyz")


class Nodes:
    """`moed serve` once for each node, with one rank or more on each. Use as a context."""

    def __init__(
        self,
        *common: str,
        own: Sequence[Sequence[str]] = ((), ()),
        environments: Sequence[Mapping[str, str]] | None = None,
        port: int | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        """`own`: what each node's line has beside the `common` words, one entry for each node."""
        self.port = free_port() if port is None else port
        self._common, self._own = common, own
        self._environments = [{}] * len(own) if environments is None else environments
        self._ranks_per_node = ranks_per_node
        self._stack = ExitStack()
        self.daemons: list[Daemon] = []

    def __enter__(self) -> "Nodes":
        for number in range(len(self._own)):
            self.start(number)
        return self

    def start(self, number: int) -> Daemon:
        """The line of one node."""
        nnodes = len(self._own)
        words = ["--nnodes", str(nnodes), "--node-rank", str(number)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        words += ["--probe-port", "0", *self._common, *self._own[number]]
        ranks = nnodes * self._ranks_per_node
        daemon = Daemon(*words, ranks=ranks, environment=self._environments[number])
        self.daemons.append(self._stack.enter_context(daemon))
        return daemon

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def refusals(self, timeout_s: float) -> list[str]:
        """What each node says at its end; fails where one goes on."""
        codes = [daemon.wait_exit(timeout_s) for daemon in self.daemons]
        assert all(codes), (codes, self.logs)
        assert "Traceback" not in self.logs, self.logs
        return [daemon.log for daemon in self.daemons]

    @property
    def logs(self) -> str:
        return "\n\n".join(daemon.log for daemon in self.daemons)


def probe(daemon: Daemon, path: str = "/readyz") -> httpx.Response:
    """What a node without HTTP answers, on the port that it has told last."""
    daemon.wait_log(PROBES, START_S)
    url: str = PROBES.findall(daemon.log)[-1]
    return httpx.get(url + path, timeout=5)


def await_probe(node: Daemon, code: int, timeout_s: float = 20.0) -> str:
    """Until the readiness of a node without HTTP is `code`; returns its reason."""
    deadline = time.monotonic() + timeout_s
    while (answer := probe(node)).status_code != code:
        assert time.monotonic() < deadline, (answer.text, node.log)
        time.sleep(0.02)
    return str(answer.json()["reason"])


def kill_all(daemon: Daemon) -> None:
    """As if the node's power went: every process of it at once."""
    own = psutil.Process(daemon.process.pid)
    for process in [own, *own.children(recursive=True)]:
        process.kill()


def torchrun(*words: str) -> tuple[str, ...]:
    """The command line of `torchrun words… -m moed.server`."""
    return (sys.executable, "-m", "torch.distributed.run", *words, "-m", "moed.server")


def ranks_of(daemon: Daemon) -> list[psutil.Process]:
    """That torchrun has started on this node, the first one first."""
    agent = psutil.Process(daemon.process.pid)
    ranks = [c for c in agent.children() if "moed.server" in " ".join(c.cmdline())]
    return sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))
