"""Which experts are busy, as the processes report it: since the start, and over the last minute.

Legend: E experts, R processes.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moed.config.engine_config import EngineConfig
from moed.server.messages import ExpertLoad

WINDOW_S = 60.0
# The window's begin is known this exactly; each mark keeps one copy of the counts.
MARK_INTERVAL_S = 10.0


@dataclass(frozen=True)
class LayerLoad:
    """One MoE layer."""

    layer: int
    """Of the decoder."""
    rows: list[int]
    """[E] (token, choice) pairs since the start."""
    window_rows: list[int]
    """[E] the same over the window."""
    window_rank_rows: list[int]
    """[R] over the window, by the process that computed them."""

    @property
    def imbalance(self) -> float:
        """The busiest process's rows over the mean, at least 1; 1 for no rows at all."""
        mean = sum(self.window_rank_rows) / max(1, len(self.window_rank_rows))
        return max(self.window_rank_rows) / mean if mean else 1.0

    @property
    def balancedness(self) -> float:
        """The processes' mean over the busiest one, in (0, 1]; 1 for no rows at all."""
        return 1 / self.imbalance

    @property
    def entropy(self) -> float:
        """Of the window's rows over the experts, as a share of the most that is possible: 1 where
        all are equally busy, 0 where one has everything; 1 for no rows at all.
        """
        total, num_experts = sum(self.window_rows), len(self.window_rows)
        if not total or num_experts < 2:
            return 1.0
        shares = [rows / total for rows in self.window_rows if rows]
        return abs(sum(share * math.log(share) for share in shares)) / math.log(num_experts)

    @property
    def num_dead(self) -> int:
        """Experts without a row in the window; 0 when there were no rows at all."""
        return self.window_rows.count(0) if any(self.window_rows) else 0

    def hot_share(self, top: int) -> float:
        """The part of the window's rows that its `top` busiest experts have; 0 for no rows."""
        total = sum(self.window_rows)
        return sum(sorted(self.window_rows)[-top:]) / total if total else 0.0


class ExpertLoads:
    """Keeps the last report of each process."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._num_ranks = config.parallel.world_size
        self._num_experts = config.model.num_experts
        self._layers: list[int] = []
        # [layers, R, E]; each process its own part.
        self._counts = np.zeros((0, self._num_ranks, self._num_experts), dtype=np.int64)
        self._marks: deque[tuple[float, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]] = deque()

    def add(self, report: ExpertLoad) -> None:
        """Take in a report; it replaces the process's earlier one."""
        if not self._layers:
            self._layers = report.layers
            self._counts = np.zeros(
                (len(report.layers), self._num_ranks, self._num_experts), dtype=np.int64
            )
            self._marks.append((self._clock(), self._counts.copy()))
        self._mark()
        for index, layer in enumerate(report.layers):
            experts = self._config.placement(layer).local_expert_ids(report.rank)
            self._counts[index, report.rank, list(experts)] = report.rows[index][: len(experts)]

    def _mark(self) -> None:
        """Remember the counts every now and then, and forget what lies before the window."""
        now = self._clock()
        if not self._marks or now - self._marks[-1][0] < MARK_INTERVAL_S:
            return
        self._marks.append((now, self._counts.copy()))
        while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    @property
    def window_s(self) -> float:
        """Seconds that the window covers now; 0 before the first report."""
        self._mark()
        return self._clock() - self._marks[0][0] if self._marks else 0.0

    def layers(self) -> list[LayerLoad]:
        """Of all MoE layers; empty before the first report."""
        self._mark()
        if not self._layers:
            return []
        window = self._counts - self._marks[0][1]
        share = 1
        if not self._config.parallel.enable_expert_parallel:
            # Every process computes its part of every row.
            share = self._num_ranks
        rows, window_rows = self._counts.sum(axis=1) // share, window.sum(axis=1) // share
        window_ranks = window.sum(axis=2)
        return [
            LayerLoad(
                layer,
                rows[index].tolist(),
                window_rows[index].tolist(),
                window_ranks[index].tolist(),
            )
            for index, layer in enumerate(self._layers)
        ]

    def rank_rows(self) -> list[int]:
        """[R] rows of each process since the start, all layers together."""
        totals: list[int] = self._counts.sum(axis=(0, 2)).tolist()
        return totals
