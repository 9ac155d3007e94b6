"""`moed serve` on a node other than the first: starts this node's ranks, and ends with them.

moed serve --node-rank 1 ─ launcher (this process: no torch)
                           ├─ the node's keeper (probes, link to the first node)
                           └─ rank G … rank 2G-1

What becomes of a rank that is lost is decided by the first node's launcher, which hears of it here
(`moed.server.node_ranks`). Where the ranks have not met yet, it ends the launch.
"""

import contextlib
import logging
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import wait

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError, PeerLost
from moed.config.settings import ServeSettings
from moed.dist.launch import LaunchEnvironment
from moed.server.endings import DRAIN_SLACK_S, FAILURE_GATHERING_S, LEAVE_S, report_end
from moed.server.keeper_process import KEEPER_ENDED, KeeperProcess
from moed.server.late_node import find_launch
from moed.server.node_messages import Joined, LinkLost, NodeOrder, NodeStopping, Over
from moed.server.node_of_rank import tell_others
from moed.server.node_ranks import NodeRanks
from moed.server.processes import StopSignals
from moed.server.wire import wire_from

logger = logging.getLogger(__name__)

REPORT_S = 0.5
# Whether the launch is under way already.
ASK_S = 2.0
# For the other nodes to notice that this one was lost, when it is started again at once: its ranks
# are not wanted until then.
LATE_S = 5.0
# For the first node's launcher, to say what becomes of a rank that has failed.
DECISION_S = 10.0


def serve_node(config: EngineConfig) -> int:
    """Serve until the group stops or fails; returns the exit code of `moed serve`.

    Raises `ConfigError` when the probes' port cannot be bound.
    """
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
    """Holds the processes of one node. Use as a context: leaving it ends whatever still runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        context = multiprocessing.get_context("spawn")
        self._ranks = NodeRanks(config, context)
        self._signals = StopSignals(context)
        self._keeper: KeeperProcess | None = None
        self._stops_at: float | None = None
        self._failed_since: float | None = None
        self._report_at = 0.0
        self._ask_at = time.monotonic() + ASK_S

    def __enter__(self) -> "NodeSupervisor":
        self._signals.install()
        self._keeper = KeeperProcess(self._config)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranks.end_all()
        if self._keeper is not None:
            self._keeper.close()

    @property
    def _link(self) -> KeeperProcess:
        assert self._keeper is not None
        return self._keeper

    def start(self) -> None:
        """Start one process per local rank, or wait for what a launch orders that has lost this
        node; returns soon.
        """
        if not self._join_again():
            self._ranks.start()

    def _join_again(self) -> bool:
        """False where there is no such launch."""
        nodes, num_local = self._config.nodes, self._config.parallel.num_local_ranks
        assert nodes is not None
        told = find_launch(nodes)
        if told is None:
            return False
        logger.info("the launch goes on without this node, and it joins it again")
        wire, first = wire_from(told, nodes), nodes.node_rank * num_local
        assert wire.secret is not None
        joined = Joined(
            node=nodes.node_rank,
            name=socket.gethostname(),
            ranks=list(range(first, first + num_local)),
            address=wire.address,
            secret=wire.secret,
        )
        self._ranks.wait_for_order(joined)
        self._link.tell(joined)
        return True

    def watch(self) -> int:
        """Wait until the ranks leave together, fail for good, or are to stop; returns the exit
        code.
        """
        while True:
            for news in self._ranks.collect():
                self._link.tell(news)
            self._ask_again()
            exit_code = self._look_at_signals()
            if exit_code is None:
                exit_code = self._look_at_ranks()
            if exit_code is None:
                self._report()
                exit_code = self._wait()
            if exit_code is not None:
                return exit_code

    def _ask_again(self) -> None:
        """This node may have come before the others had noticed that it was lost."""
        now = time.monotonic()
        if not self._ranks.have_met and now >= self._ask_at:
            self._ask_at = now + ASK_S
            self._join_again()

    def _look_at_signals(self) -> int | None:
        numbers = self._signals.numbers
        if len(numbers) > 1:
            logger.warning("second signal: stopping now")
            return 128 + numbers[-1]
        if numbers and not self._ranks.have_met:
            logger.info("stopping before the ranks are ready: no request is open")
            return 0
        if numbers and self._stops_at is None:
            timeout_s = self._config.server.shutdown_timeout_s
            logger.info(
                "stopping, with all other nodes, for which open requests get up to "
                "%g s; signal again to stop this one now",
                timeout_s,
            )
            self._stops_at = time.monotonic() + timeout_s + DRAIN_SLACK_S + LEAVE_S
            # It tells the front end, which stops all ranks together.
            self._link.tell(NodeStopping())
        if self._stops_at is not None and time.monotonic() > self._stops_at:
            logger.warning("the other nodes did not stop in time")
            return 0
        return None

    def _look_at_ranks(self) -> int | None:
        """Returns the exit code once they have left, or failed with nobody to decide."""
        if self._ranks.have_left:
            return 0
        if not self._ranks.failed:
            self._failed_since = None
            return None
        now = time.monotonic()
        if self._failed_since is None:
            self._failed_since = now
        patience_s = DECISION_S if self._ranks.have_met else LATE_S
        if now - self._failed_since < patience_s:
            return None
        return self._end("")

    def _report(self) -> None:
        """Twice a second, and at once when something has changed."""
        now = time.monotonic()
        if self._ranks.have_met and (self._ranks.has_news() or now >= self._report_at):
            self._report_at = now + REPORT_S
            self._link.tell(self._ranks.report())

    def _wait(self) -> int | None:
        """Until there is news, and act on the keeper's. Returns the exit code where it says so."""
        wake_at = self._report_at if self._ranks.have_met else self._ask_at
        timeout_s = max(0.0, wake_at - time.monotonic())
        sources = [self._signals.reader, self._link.pipe, *self._ranks.sources]
        ready = wait(sources, timeout_s)
        self._signals.clear(ready)
        return self._obey() if self._link.pipe in ready else None

    def _obey(self) -> int | None:
        match self._link.receive():
            case NodeOrder() as order:
                self._ranks.obey(order)
            case Over(error):
                return self._end(error) if error else self._leave()
            case LinkLost(error):
                logger.error("%s", error)
                return PeerLost.exit_code
            case None:
                logger.error("%s", KEEPER_ENDED)
                return PeerLost.exit_code
        return None

    def _leave(self) -> int:
        """All do, as they were asked to."""
        self._ranks.await_ends(LEAVE_S)
        return 0

    def _end(self, error: str) -> int:
        """For good, because of a rank of this node or of another one (`error`); the cause is told
        last.
        """
        self._ranks.await_ends(FAILURE_GATHERING_S)
        failed = self._ranks.failed
        if not failed:
            logger.error("the launch ends: %s", error)
            return PeerLost.exit_code
        if error:
            logger.warning("the launch ends: %s", error)
        return report_end(failed, failed[0])
