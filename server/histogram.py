"""Histograms that cost next to nothing to add to: for what happens with every token or step."""

from bisect import bisect_left
from collections.abc import Sequence

INFINITY = float("inf")


class Histogram:
    """Counts by bucket, the last one without a limit, and the sum of what was added."""

    __slots__ = ("_limits", "counts", "sum")

    def __init__(self, limits: Sequence[float]) -> None:
        """`limits`: the buckets' inclusive upper ends, ascending."""
        self._limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._limits, value)] += 1
        self.sum += value


def cumulated(limits: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each holds all below it."""
    total, buckets = 0, []
    for limit, count in zip((*limits, INFINITY), counts, strict=True):
        total += count
        buckets.append(("+Inf" if limit == INFINITY else str(limit), float(total)))
    return buckets
