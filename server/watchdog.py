"""Looks at the ranks while they work: who keeps the others waiting, how long, and in which step.

It sleeps while they sleep: the front end says when it has woken them.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moed.server.heartbeats import Beat

logger = logging.getLogger(__name__)

LOOK_S = 0.5
# Of the bound: then it is told, and readiness turns red.
WARN_SHARE = 0.5
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Stall:
    """The ranks have not gone on for a while."""

    rank: int | None
    """The one that is waited for; None when that cannot be told."""
    step_id: int
    seconds: float
    is_stopped: bool = False
    """By a signal."""


class Watchdog:
    """The launcher calls `look` when `time_left_s` is over."""

    def __init__(
        self,
        read: Callable[[], Sequence[Beat]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gives what each rank has written last."""
        self._read = read
        self._timeout_s = timeout_s
        self._clock = clock
        self._woken = (0, 0.0)
        self._is_awake = False
        self._stopped_since: dict[int, float] = {}

    def on_wake(self, wake_number: int) -> None:
        """The front end has woken the ranks."""
        number, woken_at = self._woken
        if all(beat.wake_number >= number for beat in self._read()):
            woken_at = self._clock()
        self._woken = (wake_number, woken_at)
        self._is_awake = True

    def on_new_group(self) -> None:
        """It is watched from now on: its forming too."""
        self._woken = (0, 0.0)
        self._is_awake = True
        self._stopped_since = {}

    @property
    def time_left_s(self) -> float | None:
        return LOOK_S if self._is_awake else None

    def is_late(self, stall: Stall) -> bool:
        """Its time is over."""
        return stall.seconds >= self._timeout_s

    def look(self, stopped: Sequence[int], is_formed: bool) -> Stall | None:
        """What is worth telling. `stopped`: ranks whose processes a signal has stopped. Falls
        asleep when all ranks have.
        """
        beats, now = self._read(), self._clock()
        stall = self._stopped(stopped, beats, now)
        if stall is None and is_formed:
            stall = self._stalled(beats, now)
            number = self._woken[0]
            self._is_awake = not all(b.is_asleep and b.wake_number >= number for b in beats)
        if stall is None or stall.seconds < self._timeout_s * WARN_SHARE:
            return None
        return stall

    def _stopped(self, stopped: Sequence[int], beats: Sequence[Beat], now: float) -> Stall | None:
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        if not stopped:
            return None
        rank = min(stopped, key=lambda rank: self._stopped_since[rank])
        seconds = now - self._stopped_since[rank]
        return Stall(rank, _step(beats), seconds, is_stopped=True)

    def _stalled(self, beats: Sequence[Beat], now: float) -> Stall | None:
        number, woken_at = self._woken
        waits = [now - beat.since for beat in beats if beat.since and not beat.is_asleep]
        if any(beat.is_asleep and beat.wake_number < number for beat in beats):
            waits.append(now - woken_at)
        if not waits:
            return None
        # Who has made fewer collectives than others is late, unless all wait in the same one.
        fewest = min(beat.num_entered for beat in beats)
        late = [rank for rank, beat in enumerate(beats) if beat.num_entered == fewest]
        busy = [rank for rank in late if not beats[rank].is_inside]
        rank = busy[0] if busy else late[0] if len(late) < len(beats) else None
        # Nobody has waited before the last one moved.
        seconds = min(waits)
        return Stall(rank, _step(beats), seconds)


def _step(beats: Sequence[Beat]) -> int:
    """The one that is not over: who is late may not have begun it."""
    return max(beat.step_id for beat in beats)


def describe(stall: Stall, name: str | None) -> str:
    """For a person: who (`name`), where, how long."""
    if stall.rank is None or name is None:
        return (
            f"no rank has got on for {stall.seconds:.0f} s in step {stall.step_id}: all wait in "
            "the same collective"
        )
    how = ", stopped by a signal," if stall.is_stopped else ""
    return f"{name}{how} keeps the others waiting for {stall.seconds:.0f} s in step {stall.step_id}"


def ask_for_stacks(pid: int) -> str:
    """Have the process write the stacks of its threads to the log, and return what can be seen of
    it from here: a process that is stopped writes nothing.
    """
    with contextlib.suppress(OSError):
        os.kill(pid, STACKS_SIGNAL)
    threads = []
    for folder in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name, wait = ((folder / file).read_text().strip() for file in ("comm", "wchan"))
            state = process_state(int(folder.name))
            threads.append(f"{name} {state} {wait if wait != '0' else ''}".rstrip())
    return f"threads: {'; '.join(threads)}"


def is_stopped(pid: int) -> bool:
    """By a signal, or a debugger."""
    return process_state(pid) in ("T", "t")


def process_state(pid: int) -> str:
    """The kernel's letter: R, S, D, T, Z; empty where it does not say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it may hold anything.
    return status.rpartition(")")[2].split()[0]
