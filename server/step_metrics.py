"""Series about the ranks' steps, from what the ranks have told last."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from moed.moe.part_times import Part
from moed.server.histogram import cumulated
from moed.server.messages import DurationCounts, RankStats, StepDurations
from moed.server.metric_buckets import PART_S, STEP_S
from moed.server.phases import GROUP_PHASES

SAMPLED = "Of a step now and then; those that replay a CUDA graph tell nothing."


class StepMetrics:
    """Of all DP ranks of one front end."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._clock = clock
        self._durations: dict[int, StepDurations] = {}
        self._bases: dict[int, StepDurations] = {}
        self._last_told: dict[int, tuple[float, bool]] = {}

    def start_anew(self) -> None:
        """The ranks count from 0 again; these series do not."""
        self._bases = dict(self._durations)

    def on_durations(self, durations: StepDurations) -> None:
        base = self._bases.get(durations.rank)
        self._durations[durations.rank] = durations if base is None else _joined(base, durations)

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
                steps.add_metric((self._model_name, str(rank), phase), *_told(STEP_S, counts))
            waits.add_metric((self._model_name, str(rank)), *_told(STEP_S, durations.waits))
        for rank, (told_at, is_busy) in sorted(self._last_told.items()):
            seconds = self._clock() - told_at if is_busy else 0.0
            lag.add_metric((self._model_name, str(rank)), seconds)
        yield from (steps, waits, lag)
        yield from self._part_families()

    def _part_families(self) -> Iterator[Metric]:
        """Of all ranks together."""
        exchange = HistogramMetricFamily(
            "moed:all2all_seconds",
            f"What one exchange of rows took in a layer, waiting for the others too. {SAMPLED}",
            labels=("model_name", "op", "phase"),
        )
        gemm = HistogramMetricFamily(
            "moed:moe_gemm_seconds",
            f"What a layer's experts took, on one rank. {SAMPLED}",
            labels=("model_name", "phase"),
        )
        attention = HistogramMetricFamily(
            "moed:attention_seconds",
            f"What a layer's attention took, on one rank, projections included. {SAMPLED}",
            labels=("model_name", "phase"),
        )
        for phase in GROUP_PHASES:
            own = (self._model_name, phase)
            gemm.add_metric(own, *self._part(Part.EXPERTS, phase))
            attention.add_metric(own, *self._part(Part.ATTENTION, phase))
            for part in (Part.DISPATCH, Part.COMBINE):
                labels = (self._model_name, part, phase)
                exchange.add_metric(labels, *self._part(part, phase))
        yield from (exchange, gemm, attention)

    def _part(self, part: Part, phase: str) -> tuple[list[tuple[str, float]], float]:
        total = DurationCounts([0] * (len(PART_S) + 1), 0.0)
        for durations in self._durations.values():
            total = _sum(total, durations.parts[part][phase])
        return _told(PART_S, total)


def _told(
    limits: Sequence[float], durations: DurationCounts
) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum, as Prometheus has them."""
    return cumulated(limits, durations.counts), durations.sum_s


def _joined(base: StepDurations, now: StepDurations) -> StepDurations:
    parts = {part: _joined_phases(base.parts[part], own) for part, own in now.parts.items()}
    steps = _joined_phases(base.steps, now.steps)
    return StepDurations(now.rank, steps, _sum(base.waits, now.waits), parts)


def _joined_phases(
    base: Mapping[str, DurationCounts], now: Mapping[str, DurationCounts]
) -> dict[str, DurationCounts]:
    return {phase: _sum(base[phase], counts) for phase, counts in now.items()}


def _sum(one: DurationCounts, two: DurationCounts) -> DurationCounts:
    counts = [a + b for a, b in zip(one.counts, two.counts, strict=True)]
    return DurationCounts(counts, one.sum_s + two.sum_s)
