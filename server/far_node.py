"""The ranks of another node, as the first node's launcher sees them: their own launcher reports how
they are, and is ordered how they should be.
"""

import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from moed.server.endings import EXIT_PROCESS_DIED
from moed.server.heartbeats import Beat
from moed.server.messages import PeerGone, RankFailure
from moed.server.node_messages import NodeOrder, NodeReport, RankReport, shortened
from moed.server.rank_process import describe_end

# Reports come twice a second: an older one tells nothing of a rank's step.
FRESH_S = 3.0


class FarRank:
    """One of them; see `AnyRank`."""

    def __init__(self, rank: int, node: "FarNode") -> None:
        self.rank = rank
        self._node = node
        self.number = 0
        """Which process of this rank is wanted: what is heard of others does not count."""
        self._reason: str | None = None
        self._last: RankReport | None = None

    def take(self, report: RankReport) -> None:
        if report.number == self.number:
            self._last = report

    def lose_with_node(self) -> None:
        """Its launcher is another one."""
        self._last = RankReport(
            number=self.number,
            pid=0,
            exit_code=-signal.SIGKILL,
            error="the launcher of its node has ended, and was started again",
            error_code=EXIT_PROCESS_DIED,
        )

    def begin_again(self) -> None:
        """Another process is wanted."""
        self.number += 1
        self._reason = self._last = None

    def end(self, reason: str) -> None:
        """See `AnyRank.end`: it is, as soon as another process is wanted."""
        self._reason = reason

    @property
    def exit_code(self) -> int | None:
        if self._last is not None and self._last.exit_code is not None:
            return self._last.exit_code
        return None if self._reason is None else -signal.SIGKILL

    @property
    def failure(self) -> RankFailure | None:
        last = self._last
        if last is None or not last.error:
            return None
        return RankFailure(
            rank=self.rank,
            error=last.error,
            details="",
            is_consequence=last.is_consequence,
            exit_code=last.error_code,
        )

    @property
    def door(self) -> int:
        return -1 if self._last is None else self._last.door

    @property
    def peer_gone(self) -> PeerGone | None:
        last = self._last
        if last is None or last.lost_epoch < 0:
            return None
        return PeerGone(self.rank, last.lost_epoch, last.lost_error)

    @property
    def is_stopped(self) -> bool:
        return self._last is not None and self._last.is_stopped

    @property
    def has_come_up(self) -> bool:
        return self._last is not None and self._last.has_come_up

    @property
    def name(self) -> str:
        pid = 0 if self._last is None else self._last.pid
        return f"rank {self.rank} (process {pid} on {self._node.name})"

    def report(self) -> str:
        """See `AnyRank.report`."""
        name = f"rank {self.rank} on {self._node.name}"
        return describe_end(name, self._reason, self.failure, self.exit_code)

    def beat(self, heard_at: float) -> Beat | None:
        """What it had written last when it was heard; None: nothing is known."""
        last = self._last
        if last is None:
            return None
        return Beat(
            num_entered=last.num_entered,
            is_inside=last.is_inside,
            since=0.0 if last.still_s is None else heard_at - last.still_s,
            step_id=last.step_id,
            wake_number=last.wake_number,
            is_asleep=last.is_asleep,
        )


class FarNode:
    """Another node. An order that may not have been heard is sent again with its next report."""

    def __init__(
        self, node: int, ranks: Sequence[int], send: Callable[[NodeOrder], object]
    ) -> None:
        self.node = node
        self._host = self._launcher = ""
        self._send = send
        self._heard_at = 0.0
        self.ranks = [FarRank(rank, self) for rank in ranks]
        self._order = NodeOrder(node=node, number=0, epoch=0, rank_numbers=[0] * len(ranks))

    @property
    def name(self) -> str:
        """For a person."""
        return f"node {self.node}" + (f", {self._host}" if self._host else "")

    def on_report(self, report: NodeReport) -> None:
        if len(report.ranks) != len(self.ranks) or report.epoch > self._order.epoch:
            return  # of no launcher that this one has ever ordered
        self._host, self._heard_at = report.name, time.monotonic()
        known, self._launcher = self._launcher, report.launcher
        if known not in ("", report.launcher):
            for rank in self.ranks:
                rank.lose_with_node()
            return  # what is ordered next it has to hear
        for rank, found in zip(self.ranks, report.ranks, strict=True):
            rank.take(found)
        if report.order < self._order.number:
            self._send(self._order)

    @property
    def is_silent(self) -> bool:
        """For now."""
        return time.monotonic() - self._heard_at > FRESH_S

    @property
    def beats(self) -> list[Beat] | None:
        """By local rank; None where they are not known for now."""
        if self.is_silent:
            return None
        found = [rank.beat(self._heard_at) for rank in self.ranks]
        beats = [beat for beat in found if beat is not None]
        return beats if len(beats) == len(found) else None

    # Orders --------------------------------------------------------------------------------------

    def form_anew(self, epoch: int, lost: Collection[object], store_port: int) -> None:
        """Leave older groups for `epoch`, with other processes for the `lost`. `store_port`: where
        they meet; 0: they wait at the door.
        """
        for rank in self.ranks:
            if rank in lost:
                rank.begin_again()
        self._change(epoch=epoch, rank_numbers=self._numbers, store_port=store_port, stacks_of=[])

    def replace(self, rank: FarRank) -> None:
        """Another process for this one."""
        rank.begin_again()
        self._change(rank_numbers=self._numbers)

    def let_in(self, store_port: int) -> None:
        """All are at the door."""
        self._change(store_port=store_port)

    def tell_trouble(self, text: str) -> None:
        """Why it is not ready; empty: it is."""
        self._change(trouble=shortened(text))

    def turn_to_frontend(self, number: int) -> None:
        """Another front end will be where `number` have been before."""
        self._change(frontend=number)

    def ask_for_stacks(self, rank: int | None) -> None:
        """Of this one, or of all; they are in the log there."""
        asked = [i for i, found in enumerate(self.ranks) if rank is None or found.rank == rank]
        self._change(stacks_of=asked)

    @property
    def _numbers(self) -> list[int]:
        return [rank.number for rank in self.ranks]

    def _change(self, **fields: Any) -> None:
        changed = msgspec.structs.replace(self._order, **fields)
        if changed != self._order:
            self._order = msgspec.structs.replace(changed, number=self._order.number + 1)
            self._send(self._order)
