"""What the daemon says of itself: starting, ready, draining or failed, and why."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


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
        self._is_leaving = False
        self._is_announcing = False

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY

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

    def _update(self) -> None:
        complete = self.has_tokenizer and all(rank.is_up for rank in self.ranks)
        if self.phase is Phase.STARTING and complete:
            self.phase = Phase.READY
            self.has_started = True

    def hold(self) -> bool:
        """No new requests until `release`; open ones go on. False when none are served anyway."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
            self._reason = (
                "the server was asked to drain and takes no new requests until it resumes"
            )
        return self.phase is Phase.DRAINING

    def release(self) -> bool:
        """Ready again after `hold`. False where there is no way back, or not yet one."""
        if self.phase is Phase.DRAINING and not self._is_leaving:
            self.phase = Phase.READY
            self._reason = ""
        return self.is_ready

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
        self._is_announcing = False
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING
            self._reason = "the server is shutting down and takes no new requests"

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
            return self._reason
        waiting = [f"rank {rank.rank}: {rank.phase}" for rank in self.ranks if not rank.is_up]
        if not self.has_tokenizer:
            waiting.append("the tokenizer is loading")
        return "the model is loading (" + "; ".join(waiting) + ")"

    def report(self) -> dict[str, Any]:
        """The JSON body of the probes."""
        return {
            "status": self.phase.value,
            "reason": self.reason or None,
            "ranks": [
                {"rank": rank.rank, "up": rank.is_up, "phase": rank.phase} for rank in self.ranks
            ],
        }
