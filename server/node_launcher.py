"""`moed serve` on a node other than the first: starts this node's ranks, and ends with them.

moed serve --node-rank 1 ─ launcher (this process: no torch)
                           └─ rank G … rank 2G-1
                               └─ the node's keeper (probes, link), of its first rank
"""

import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError
from moed.config.settings import ServeSettings
from moed.dist.launch import LaunchEnvironment
from moed.server.launcher import (
    DRAIN_SLACK_S,
    FAILURE_GATHERING_S,
    LEAVE_S,
    report_end,
)
from moed.server.node_of_rank import tell_others
from moed.server.rank_group import RankGroup
from moed.server.rank_process import Rank

logger = logging.getLogger(__name__)


def serve_node(config: EngineConfig) -> int:
    """Serve until the group stops or fails; returns the exit code of `moed serve`."""
    with NodeSupervisor(config) as node:
        node.start()
        return node.watch()


@contextlib.contextmanager
def telling_others(settings: ServeSettings) -> Iterator[None]:
    """What is wrong with the settings or the model here, the other nodes hear too."""
    try:
        yield
    except MoedError as error:
        host, port = settings.master_addr, settings.master_port
        num_ranks = settings.data_parallel_size * settings.tensor_parallel_size
        num_local, rest = divmod(num_ranks, settings.nnodes)
        if host is not None and settings.nnodes > 1 and num_local and not rest:
            first = settings.node_rank * num_local
            environment = LaunchEnvironment(first, num_ranks, 0, num_local, host, port, "moed")
            tell_others(environment, num_local, error)
        raise


class NodeSupervisor:
    """Holds the ranks of one node. Use as a context: leaving it ends whatever still runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = multiprocessing.get_context("spawn")
        self._group = RankGroup(config, self._context, self._spawn, {})
        self._signals: list[int] = []
        self._signal_reader, self._signal_writer = self._context.Pipe(duplex=False)

    def __enter__(self) -> "NodeSupervisor":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._signal_writer.send_bytes(b"!")

    def start(self) -> None:
        """Start one process per local rank; returns at once."""
        self._group.start(None)

    def _spawn(self, name: str, target: object, arguments: tuple[object, ...]) -> SpawnProcess:
        process = self._context.Process(name=name, target=target, args=arguments)  # type: ignore[arg-type]
        process.start()
        logger.info("started %s: process %d", name.removeprefix("moed-"), process.pid)
        return process

    def watch(self) -> int:
        """Wait until the ranks leave together, fail, or are to stop; returns the exit code."""
        deadline: float | None = None
        while True:
            if len(self._signals) > 1:
                logger.warning("second signal: stopping now")
                return 128 + self._signals[-1]
            if self._signals and deadline is None:
                timeout_s = self._config.server.shutdown_timeout_s
                logger.info(
                    "stopping, with all other nodes, for which open requests get up to "
                    "%g s; signal again to stop this one now",
                    timeout_s,
                )
                deadline = time.monotonic() + timeout_s + DRAIN_SLACK_S + LEAVE_S
                # It tells the front end, which stops all ranks together.
                self._group.ranks[0].process.terminate()
            ended = self._group.ended
            if failed := [rank for rank in ended if rank.process.exitcode]:
                return self._on_failure(failed[0], is_stopping=deadline is not None)
            if len(ended) == len(self._group.ranks):
                return 0
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                logger.warning("the other nodes did not stop in time")
                return 0
            self._wait(ended, left)

    def _wait(self, ended: list[Rank], timeout_s: float | None) -> None:
        """Until a signal, or the end of a rank that is not among the `ended`."""
        others = [rank.process.sentinel for rank in self._group.ranks if rank not in ended]
        if self._signal_reader in wait([self._signal_reader, *others], timeout_s):
            self._signal_reader.recv_bytes()

    def _on_failure(self, first: Rank, is_stopping: bool) -> int:
        """Collect everybody's words, and report the cause last."""
        if is_stopping and first.process.exitcode == 128 + signal.SIGTERM:
            logger.info("stopped before the ranks were ready: no request is open")
            return 0
        deadline = time.monotonic() + FAILURE_GATHERING_S
        while any(rank.process.is_alive() for rank in self._group.ranks):
            alive = [rank.process.sentinel for rank in self._group.ranks if rank.process.is_alive()]
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait(alive, remaining):
                break
        return report_end(self._group.ended, first)

    def __exit__(self, *exception: object) -> None:
        for rank in self._group.ranks:
            with contextlib.suppress(OSError):
                rank.process.kill()
            rank.process.join()
