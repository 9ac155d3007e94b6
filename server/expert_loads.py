"""Which experts are busy, as the processes report it: since the start, and over the last minute.

Legend: P phases, E experts, R processes.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moed.config.engine_config import EngineConfig
from moed.server.messages import ExpertLoad
from moed.server.phases import GROUP_PHASES

Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
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
    window_rank_rows_by_phase: dict[str, list[int]]
    """[R] over the window, by the process that computed them."""

    @property
    def window_rank_rows(self) -> list[int]:
        """[R] of all phases."""
        return [sum(rows) for rows in zip(*self.window_rank_rows_by_phase.values(), strict=True)]

    @property
    def imbalance(self) -> float:
        """The busiest process's rows over the mean, at least 1; 1 for no rows at all."""
        return _imbalance(self.window_rank_rows)

    def balancedness(self, phase: str) -> float:
        """The processes' mean over the busiest one, in (0, 1]; 1 for no rows at all."""
        return 1 / _imbalance(self.window_rank_rows_by_phase[phase])

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


def _imbalance(rank_rows: list[int]) -> float:
    """The most of `rank_rows` [R] over their mean."""
    mean = sum(rank_rows) / max(1, len(rank_rows))
    return max(rank_rows) / mean if mean else 1.0


class ExpertLoads:
    """Keeps the last report of each process."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._num_ranks = config.parallel.world_size
        self._num_experts = config.model.num_experts
        self._layers: list[int] = []
        # [P, layers, R, E]; each process its own part.
        self._counts = self._zeros()
        # Of groups before, in the same shape.
        self._base = self._counts
        self._reports: dict[int, ExpertLoad] = {}
        self._num_dropped_before = 0
        self.num_dropped = 0
        """(token, choice) pairs that no expert has computed, as far as that could be seen."""
        self._marks: deque[tuple[float, Counts]] = deque()

    def add(self, report: ExpertLoad) -> None:
        """Take in a report; it replaces the process's earlier one."""
        if not self._layers:
            self._layers = report.layers
            self._counts = self._zeros()
            self._base = self._counts.copy()
            self._marks.append((self._clock(), self._counts.copy()))
        self._mark()
        for index, layer in enumerate(report.layers):
            experts = self._config.placement(layer).local_expert_ids(report.rank)
            for number, phase in enumerate(GROUP_PHASES):
                own = number, index, report.rank, list(experts)
                rows = report.rows[phase][index][: len(experts)]
                self._counts[own] = self._base[own] + rows
        self._reports[report.rank] = report
        self._look_for_dropped()

    def _look_for_dropped(self) -> None:
        """Compare what was routed with what was computed, where all tell of the same steps: as they
        do when they rest.
        """
        reports = self._reports.values()
        if len(reports) < self._num_ranks or len({report.num_steps for report in reports}) > 1:
            return
        num_tokens = sum(report.num_tokens for report in reports)
        routed = num_tokens * self._config.model.top_k * len(self._layers)
        computed = int((self._counts - self._base).sum()) // self._share
        missing = self._num_dropped_before + routed - computed
        self.num_dropped = max(self.num_dropped, missing)

    @property
    def _share(self) -> int:
        """How many processes compute each row: all of them, where each does its part of it."""
        return 1 if self._config.parallel.enable_expert_parallel else self._num_ranks

    def _zeros(self) -> Counts:
        shape = (len(GROUP_PHASES), len(self._layers), self._num_ranks, self._num_experts)
        return np.zeros(shape, dtype=np.int64)

    def start_anew(self) -> None:
        """The processes count from 0 again; what is known stays."""
        self._base = self._counts.copy()
        self._reports.clear()
        self._num_dropped_before = self.num_dropped

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
        rows, window_rows = (c.sum(axis=(0, 2)) // self._share for c in (self._counts, window))
        window_ranks = window.sum(axis=3)
        return [
            LayerLoad(
                layer,
                rows[index].tolist(),
                window_rows[index].tolist(),
                dict(zip(GROUP_PHASES, window_ranks[:, index].tolist(), strict=True)),
            )
            for index, layer in enumerate(self._layers)
        ]

    def rank_rows(self) -> dict[str, list[int]]:
        """By phase, [R] rows of each process since the start, all layers together."""
        totals = self._counts.sum(axis=(1, 3)).tolist()
        return dict(zip(GROUP_PHASES, totals, strict=True))
