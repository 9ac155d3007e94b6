"""How long the parts of the layers take, in a step now and then: each call of each layer counts.

On a CPU the clock is looked at. On a GPU events are recorded, and read when they have happened;
nothing waits for them. A step that replays a CUDA graph gives nothing: its parts are one.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from moed.moe.part_times import P, Part, PartTimes, R
from moed.server.histogram import Histogram
from moed.server.metric_buckets import PART_S
from moed.server.phases import GROUP_PHASES, IDLE

# Of the steps of a phase, the first and then each so-manieth.
SAMPLE_EVERY = 64


class _Times(PartTimes, Protocol):
    """Of one step."""

    @property
    def is_complete(self) -> bool: ...

    def seconds(self) -> list[tuple[Part, float]]:
        """Once it is complete."""
        ...


class HostTimes:
    """By the clock."""

    is_complete = True

    def __init__(self) -> None:
        self._seconds: list[tuple[Part, float]] = []

    def timing(self, part: Part, call: Callable[P, R]) -> Callable[P, R]:
        """See `PartTimes`."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._seconds.append((part, time.perf_counter() - started))
            return result

        return timed

    def seconds(self) -> list[tuple[Part, float]]:
        return self._seconds


class DeviceTimes:
    """By events in the GPU's order of work."""

    def __init__(self) -> None:
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    def timing(self, part: Part, call: Callable[P, R]) -> Callable[P, R]:
        """See `PartTimes`."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            result = call(*args, **kwargs)
            end.record()
            self._events.append((part, begin, end))
            return result

        return timed

    @property
    def is_complete(self) -> bool:
        # They happen in their order.
        return not self._events or bool(self._events[-1][2].query())  # type: ignore[no-untyped-call]

    def seconds(self) -> list[tuple[Part, float]]:
        return [(part, begin.elapsed_time(end) / 1000) for part, begin, end in self._events]


class PartSamples:
    """Call `begin` before each step and `collect` after it."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._num_steps = dict.fromkeys(GROUP_PHASES, 0)
        self._pending: tuple[_Times, str, str] | None = None
        self.histograms = {
            part: {phase: Histogram(PART_S) for phase in GROUP_PHASES} for part in Part
        }
        """Of attention by the rank's own phase; of what it does with the others by the group's."""

    def begin(self, own_phase: str, group_phase: str) -> PartTimes | None:
        """Where the step is to tell its times; None: nowhere."""
        number = self._num_steps[group_phase]
        self._num_steps[group_phase] += 1
        if number % SAMPLE_EVERY or self._pending is not None:
            return None
        times: _Times = DeviceTimes() if self._is_on_gpu else HostTimes()
        self._pending = times, own_phase, group_phase
        return times

    def collect(self) -> None:
        """Take in what is complete. Never waits for the device."""
        if self._pending is None or not self._pending[0].is_complete:
            return
        (times, own_phase, group_phase), self._pending = self._pending, None
        for part, seconds in times.seconds():
            phase = own_phase if part is Part.ATTENTION else group_phase
            # A rank without tokens has nothing to attend to.
            if phase != IDLE:
                self.histograms[part][phase].add(seconds)
