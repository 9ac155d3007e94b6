"""The ranks of a node other than the first: how they are, for the first node's launcher, and what
that orders.
"""

import logging
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext

from moed.config.engine_config import EngineConfig
from moed.server.endings import log_traceback
from moed.server.heartbeats import Beat
from moed.server.local_ranks import LocalRanks
from moed.server.messages import Join, Leave, NewFrontend
from moed.server.node_messages import (
    Joined,
    NodeOrder,
    NodeReport,
    RankReport,
    RanksReady,
    shortened,
)
from moed.server.rank_process import Rank

logger = logging.getLogger(__name__)

NO_RANK = RankReport(number=0, pid=0, exit_code=-signal.SIGKILL)


class NodeRanks:
    """The node's launcher alone uses it, from one thread."""

    def __init__(self, config: EngineConfig, context: SpawnContext) -> None:
        assert config.nodes is not None
        self._node = config.nodes.node_rank
        self._stays_in_process = config.stays_in_process
        self._local = LocalRanks(config, context, {})
        self._order = NodeOrder(
            node=self._node,
            number=0,
            epoch=0,
            rank_numbers=[0] * config.parallel.num_local_ranks,
        )
        self._joined: Joined | None = None
        self._ready_number = -1
        self._told: Sequence[object] = ()
        self._launcher = uuid.uuid4().hex

    def start(self) -> None:
        self._local.start(None)

    def wait_for_order(self, joined: Joined) -> None:
        """Have no ranks until the first node orders some: it is where `joined` says."""
        self._joined = joined
        self._local.forget()

    def end_all(self) -> None:
        self._local.end_all()

    # How they are --------------------------------------------------------------------------------

    @property
    def sources(self) -> list[Connection | int]:
        """For `wait`. A process that has ended is no news any more."""
        running = [r.process.sentinel for r in self._local.ranks if r.exit_code is None]
        return [*self._local.pipes, *running]

    @property
    def have_met(self) -> bool:
        """All ranks of the launch have, and the first node's front end is known."""
        return self._joined is not None

    @property
    def failed(self) -> list[Rank]:
        """Those that ended, and not because all leave."""
        return [rank for rank in self._local.ended if rank.exit_code]

    @property
    def have_left(self) -> bool:
        """All of them, in good order."""
        ranks = self._local.ranks
        return bool(ranks) and all(rank.exit_code == 0 for rank in ranks)

    def collect(self) -> list[Joined | RanksReady]:
        """Take in what they have said; returns what the keeper does not know yet."""
        news: list[Joined | RanksReady] = []
        if not self._local.ranks:
            return news
        self._local.collect()
        first = self._local.ranks[0]
        if self._joined is None and first.joined is not None:
            self._joined = first.joined
            news.append(first.joined)
        if first.is_ready and self._ready_number < first.number:
            self._ready_number = first.number
            news.append(RanksReady())
        return news

    def has_news(self) -> bool:
        """Since the last report."""
        return self._told != self._state()

    def _state(self) -> list[object]:
        """What is worth a report at once."""
        found: list[object] = [self._order.number]
        for rank in self._local.ranks:
            gone = None if rank.peer_gone is None else rank.peer_gone.epoch
            found.append((rank.number, rank.exit_code, rank.door, gone))
        return found

    def report(self) -> NodeReport:
        """The first node's launcher has nothing else to go by."""
        self._told = self._state()
        beats, now = self._local.beats, time.monotonic()
        ranks = [report_of(rank, beats[rank.rank], now) for rank in self._local.ranks]
        return NodeReport(
            node=self._node,
            name=shortened(socket.gethostname()),
            launcher=self._launcher,
            epoch=self._order.epoch,
            order=self._order.number,
            ranks=ranks or [NO_RANK] * len(self._order.rank_numbers),
        )

    # What they should do -------------------------------------------------------------------------

    def obey(self, order: NodeOrder) -> None:
        """Make the ranks what the order says, unless a newer one came before it."""
        ranks, old = self._local.ranks, self._order
        if order.number <= old.number or order.epoch < old.epoch:
            return
        if order.node != self._node or len(order.rank_numbers) != len(old.rank_numbers):
            logger.error("an order for node %d came here, and is not obeyed", order.node)
            return
        self._order = order
        if order.trouble and order.trouble != old.trouble:
            logger.warning("the first node says: %s", order.trouble)
        if order.frontend > old.frontend and self._joined is not None:
            for rank in ranks:
                rank.tell(NewFrontend(order.frontend, self._joined.address))
        self._ask_for_stacks(set(order.stacks_of) - set(old.stacks_of))
        port = None if self._stays_in_process else order.store_port
        if not ranks:
            self._local.start(None, order.epoch, port, order.rank_numbers)
            return
        for rank, number in zip(list(ranks), order.rank_numbers, strict=True):
            if number > rank.number:
                log_traceback(rank)
                self._local.replace(rank, order.epoch, port, number)
            elif order.epoch > old.epoch:
                rank.tell(Leave(order.epoch))
        is_new = (order.epoch, order.store_port) != (old.epoch, old.store_port)
        if self._stays_in_process and order.store_port and is_new:
            for rank in self._local.ranks:
                rank.let_in(Join(order.epoch, order.store_port), None)

    def _ask_for_stacks(self, local_ranks: set[int]) -> None:
        for index in local_ranks & set(range(len(self._local.ranks))):
            rank = self._local.ranks[index]
            logger.warning("process %d: %s", rank.pid, rank.stacks())

    def await_ends(self, timeout_s: float) -> None:
        """Of all processes, within a bound."""
        deadline = time.monotonic() + timeout_s
        while running := [r.process.sentinel for r in self._local.ranks if r.exit_code is None]:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait(running, remaining):
                return


def report_of(rank: Rank, beat: Beat, now: float) -> RankReport:
    """One rank; `beat` is what it has written last, by this host's clock."""
    failure, gone = rank.failure, rank.peer_gone
    return RankReport(
        number=rank.number,
        pid=rank.pid,
        exit_code=rank.exit_code,
        error="" if failure is None else shortened(failure.error),
        error_code=0 if failure is None else failure.exit_code,
        is_consequence=failure is not None and failure.is_consequence,
        has_come_up=rank.has_come_up,
        door=rank.door,
        lost_epoch=-1 if gone is None else gone.epoch,
        lost_error="" if gone is None else shortened(gone.error),
        is_stopped=rank.is_stopped,
        num_entered=beat.num_entered,
        is_inside=beat.is_inside,
        still_s=max(0.0, now - beat.since) if beat.since else None,
        step_id=beat.step_id,
        wake_number=beat.wake_number,
        is_asleep=beat.is_asleep,
    )
