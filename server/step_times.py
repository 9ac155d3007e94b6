"""How long the steps of a rank take, and how long it waits for the others before them: counted here
in buckets, and told to the front end at most once a second.
"""

import time
from collections.abc import Callable

from moed.server.histogram import Histogram
from moed.server.messages import DurationCounts, StepDurations
from moed.server.metric_buckets import STEP_S
from moed.server.scheduler import Schedule

REPORT_INTERVAL_S = 1.0
PREFILL, DECODE, IDLE = "prefill", "decode", "idle"


class StepTimes:
    """Call `on_step` after each step, and `before_sleep` when none follows for a while."""

    def __init__(self, rank: int, send: Callable[[StepDurations], None]) -> None:
        self._rank = rank
        self._send = send
        self._steps = {phase: Histogram(STEP_S) for phase in (PREFILL, DECODE, IDLE)}
        self._waits = Histogram(STEP_S)
        self._told_at = 0.0
        self._is_news = False

    def on_step(self, schedule: Schedule, wait_s: float, step_s: float) -> None:
        """`wait_s`: for the ranks' agreement; `step_s`: what came after it."""
        self._steps[phase_of(schedule)].add(step_s)
        self._waits.add(wait_s)
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
        steps = {phase: _told(durations) for phase, durations in self._steps.items()}
        self._send(StepDurations(self._rank, steps, _told(self._waits)))


def _told(durations: Histogram) -> DurationCounts:
    return DurationCounts(list(durations.counts), durations.sum)


def phase_of(schedule: Schedule) -> str:
    """A step that computes any piece of a prompt is one of prefill."""
    if not schedule.requests:
        return IDLE
    is_decode = all(
        scheduled.num_tokens == 1 and scheduled.request.num_output_tokens
        for scheduled in schedule.requests
    )
    return DECODE if is_decode else PREFILL
