"""Series about the ranks' steps, from what the ranks have told last."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from moed.server.histogram import cumulated
from moed.server.messages import DurationCounts, RankStats, StepDurations
from moed.server.metric_buckets import STEP_S


class StepMetrics:
    """Of all DP ranks of one front end."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._clock = clock
        self._durations: dict[int, StepDurations] = {}
        self._last_told: dict[int, tuple[float, bool]] = {}

    def on_durations(self, durations: StepDurations) -> None:
        self._durations[durations.rank] = durations

    def on_stats(self, stats: RankStats) -> None:
        is_busy = bool(stats.num_running or stats.num_waiting)
        self._last_told[stats.rank] = (self._clock(), is_busy)

    def families(self) -> Iterator[Metric]:
        steps = HistogramMetricFamily(
            "moed:step_seconds",
            "What a step of the rank took, from the ranks' agreement on; idle: without own tokens.",
            labels=("model_name", "engine", "phase"),
        )
        waits = HistogramMetricFamily(
            "moed:all2all_wait_seconds",
            "What the rank waited for the others before a step; the one that never waits is late.",
            labels=("model_name", "ep_rank"),
        )
        lag = GaugeMetricFamily(
            "moed:rank_step_lag_seconds",
            "Since the rank's last report, while it has requests; 0 when it has none.",
            labels=("model_name", "engine"),
        )
        for rank, durations in sorted(self._durations.items()):
            for phase, counts in durations.steps.items():
                steps.add_metric((self._model_name, str(rank), phase), *_told(counts))
            waits.add_metric((self._model_name, str(rank)), *_told(durations.waits))
        for rank, (told_at, is_busy) in sorted(self._last_told.items()):
            seconds = self._clock() - told_at if is_busy else 0.0
            lag.add_metric((self._model_name, str(rank)), seconds)
        yield from (steps, waits, lag)


def _told(durations: DurationCounts) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum, as Prometheus has them."""
    return cumulated(STEP_S, durations.counts), durations.sum_s
