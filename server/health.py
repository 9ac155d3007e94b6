"""What the daemon says of itself: starting, ready, recovering, draining or failed, and why."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


HELD = "the server was asked to drain and takes no new requests until it resumes"


@dataclass
class RankHealth:
    """One rank, as last heard of."""

    rank: int
    is_up: bool = False
    phase: str = "starting the process"


class Health:
    """Changed by the front end alone. Once it is leaving or has failed, the daemon is never ready
    again; a drain that was asked for while it serves can be taken back.
    """

    def __init__(self, num_ranks: int) -> None:
        self.phase = Phase.STARTING
        self.has_started = False
        self.has_tokenizer = False
        self.ranks = [RankHealth(rank) for rank in range(num_ranks)]
        self._reason = ""
        self._is_held = self._is_leaving = False
        self._is_announcing = False
        self.holds_requests = False
        """Recovering, and not for too long yet: what comes waits with what is open."""
        self.silence = ""
        """Which other nodes have not been heard for too long; empty: none."""

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY and not self.silence

    @property
    def takes_requests(self) -> bool:
        """Whether a new request is served: when ready, and for a while after `announce_drain`."""
        announcing = self._is_announcing and self.phase is Phase.DRAINING
        return self.is_ready or announcing

    def on_progress(self, rank: int, phase: str) -> None:
        self.ranks[rank].phase = phase

    def on_rank_ready(self, rank: int) -> None:
        self.ranks[rank].is_up = True
        self.ranks[rank].phase = "ready"
        self._update()

    def on_tokenizer(self) -> None:
        self.has_tokenizer = True
        self._update()

    @property
    def is_complete(self) -> bool:
        """All that serving needs is there."""
        return self.has_tokenizer and all(rank.is_up for rank in self.ranks)

    def _update(self) -> None:
        if self.phase in (Phase.STARTING, Phase.RECOVERING) and self.is_complete:
            self.has_started = True
            self._go_on()

    def _go_on(self) -> None:
        """As before whatever kept it from serving."""
        self.holds_requests = False
        self.phase, self._reason = Phase.READY, ""
        if self._is_held:
            self.phase, self._reason = Phase.DRAINING, HELD

    def hold(self) -> bool:
        """No new requests until `release`; open ones go on. False when none are served anyway."""
        self._is_held |= self.phase in (Phase.READY, Phase.RECOVERING)
        self.holds_requests = False
        if self.phase is Phase.READY:
            self._go_on()
        return self._is_held or self.phase is Phase.DRAINING

    def release(self) -> bool:
        """Ready again after `hold`. False where there is no way back, or not yet one."""
        self._is_held = False
        if self.phase is Phase.DRAINING and not self._is_leaving:
            self._go_on()
        return self.is_ready or self.phase is Phase.RECOVERING

    def stall(self, error: str) -> None:
        """The ranks do not get on, and may yet; `error` is empty once they do again."""
        if self.phase is Phase.READY and error:
            self.phase, self._reason, self.holds_requests = Phase.STALLED, error, True
        elif self.phase is Phase.STALLED and not error:
            self._go_on()

    def recover(self, rank: int | None, error: str) -> None:
        """A rank is gone, and the group is formed anew."""
        for other in self.ranks:
            other.is_up, other.phase = False, "joining the new group"
        if rank is not None:
            self.ranks[rank].phase = "lost, starting again"
        if self._is_leaving or self.phase in (Phase.STARTING, Phase.FAILED):
            return
        self.holds_requests = not self._is_held
        self.phase, self._reason = Phase.RECOVERING, f"the ranks recover: {error}"

    def give_up_holding(self, reason: str) -> None:
        """The recovery takes too long: no request waits for it any more."""
        if self.phase is Phase.RECOVERING:
            self.holds_requests, self._reason = False, reason

    def announce_drain(self) -> None:
        """Not ready from now on, yet where new requests were served they still are, until `drain`:
        those who follow readiness need a moment to see it.
        """
        was_ready = self.is_ready
        self.drain()
        if was_ready:
            self._is_announcing = True
            self._reason = "the server is shutting down and will soon take no new requests"

    def drain(self) -> None:
        """No new requests from now on; open ones go on, and then the daemon leaves."""
        self._is_leaving = True
        self._is_announcing = self.holds_requests = False
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING
            self._reason = "the server is shutting down and takes no new requests"

    def stay(self) -> None:
        """What it was to leave with is gone already: it does not."""
        self._is_leaving = self._is_announcing = False
        if self.phase is Phase.DRAINING:
            self._go_on()

    def fail(self, rank: int, error: str) -> None:
        """A rank is gone, and with it the group."""
        self.ranks[rank].is_up = False
        self.ranks[rank].phase = "lost"
        if self.phase is not Phase.FAILED:
            self.phase = Phase.FAILED
            self._reason = error

    @property
    def reason(self) -> str:
        """One sentence for a person; empty when ready."""
        if self.phase is not Phase.STARTING:
            return self._reason or self.silence
        waiting = [f"rank {rank.rank}: {rank.phase}" for rank in self.ranks if not rank.is_up]
        if not self.has_tokenizer:
            waiting.append("the tokenizer is loading")
        return "the model is loading (" + "; ".join(waiting) + ")"

    def report(self) -> dict[str, Any]:
        """The JSON body of the probes."""
        return {
            "status": "silent" if self.phase is Phase.READY and self.silence else self.phase.value,
            "reason": self.reason or None,
            "ranks": [
                {"rank": rank.rank, "up": rank.is_up, "phase": rank.phase} for rank in self.ranks
            ],
        }
