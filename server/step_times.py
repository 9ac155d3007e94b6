"""How long the steps of a rank take, and how long it waits for the others before them: counted here
in buckets, and told to the front end at most once a second.
"""

import time
from collections.abc import Callable, Mapping

from moed.server.histogram import Histogram
from moed.server.messages import DurationCounts, StepDurations
from moed.server.metric_buckets import STEP_S
from moed.server.part_times import PartSamples
from moed.server.phases import DECODE, IDLE, PREFILL

REPORT_INTERVAL_S = 1.0


class StepTimes:
    """Call `on_step` after each step, and `before_sleep` when none follows for a while."""

    def __init__(
        self, rank: int, parts: PartSamples, send: Callable[[StepDurations], None]
    ) -> None:
        """`parts` are told too."""
        self._rank = rank
        self._parts = parts
        self._send = send
        self._steps = {phase: Histogram(STEP_S) for phase in (PREFILL, DECODE, IDLE)}
        self._waits = Histogram(STEP_S)
        self._told_at = 0.0
        self._is_news = False

    def on_step(self, phase: str, wait_s: float, step_s: float) -> None:
        """`wait_s`: for the ranks' agreement; `step_s`: what came after it."""
        self._steps[phase].add(step_s)
        self._waits.add(wait_s)
        self._parts.collect()
        self._is_news = True
        now = time.monotonic()
        if now - self._told_at >= REPORT_INTERVAL_S:
            self._told_at = now
            self._tell()

    def before_sleep(self) -> None:
        if self._is_news:
            self._tell()

    def _tell(self) -> None:
        self._is_news = False
        parts = {str(part): _told(phases) for part, phases in self._parts.histograms.items()}
        waits = DurationCounts.of(self._waits)
        self._send(StepDurations(self._rank, _told(self._steps), waits, parts))


def _told(phases: Mapping[str, Histogram]) -> dict[str, DurationCounts]:
    return {phase: DurationCounts.of(durations) for phase, durations in phases.items()}
