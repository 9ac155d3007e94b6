"""Where each rank is in its step, in memory that it shares with the launcher.

A rank writes a few numbers when it enters and leaves a collective, and does nothing else for it.
Imports no torch.
"""

import ctypes
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

NUM_FIELDS = 6
ENTERED, INSIDE, SINCE, STEP, WAKE, ASLEEP = range(NUM_FIELDS)


def make_heartbeats(context: SpawnContext, num_ranks: int) -> Any:
    """Shared with processes that get it when they are spawned."""
    return context.RawArray(ctypes.c_double, num_ranks * NUM_FIELDS)


class Heartbeat:
    """One rank's pen."""

    def __init__(self, heartbeats: Any, rank: int) -> None:
        self._all = heartbeats
        self._base = rank * NUM_FIELDS

    def begin_group(self) -> None:
        """Collectives are counted from here."""
        for field in range(NUM_FIELDS):
            self._put(field, 0.0)

    def begin_step(self, step_id: int, wake_number: int) -> None:
        self._put(STEP, step_id)
        self._put(WAKE, wake_number)
        self._put(ASLEEP, 0.0)

    def enter(self) -> None:
        """A collective."""
        self._put(ENTERED, self._all[self._base + ENTERED] + 1)
        self._put(SINCE, time.monotonic())
        self._put(INSIDE, 1.0)

    def leave(self) -> None:
        self._put(SINCE, time.monotonic())
        self._put(INSIDE, 0.0)

    def sleep(self) -> None:
        """Until the next step."""
        self._put(ASLEEP, 1.0)

    def _put(self, field: int, value: float) -> None:
        self._all[self._base + field] = value


@dataclass(frozen=True)
class Beat:
    """What a rank has written last."""

    num_entered: int
    """Collectives, since the group was formed."""
    is_inside: bool
    since: float
    """`time.monotonic()` of the last time that it entered or left one; 0: never yet."""
    step_id: int
    wake_number: int
    is_asleep: bool


def read_beats(heartbeats: Any) -> list[Beat]:
    """By rank. Not at one instant: numbers may be a moment apart."""
    values = list(heartbeats)
    beats = []
    for base in range(0, len(values), NUM_FIELDS):
        own = values[base : base + NUM_FIELDS]
        beats.append(
            Beat(
                int(own[ENTERED]),
                bool(own[INSIDE]),
                own[SINCE],
                int(own[STEP]),
                int(own[WAKE]),
                bool(own[ASLEEP]),
            )
        )
    return beats
