"""Experts on a CPU, on rows in the batched format.

Legend: e local experts, C capacity per expert, D hidden, I intermediate size, p rows in use.
"""

from typing import ClassVar

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts.base import ExpertWeights


class TorchBatchedExperts:
    """Two matrix products per expert that has rows, straight from the dispatched rows and into
    the output.

    Cost follows the rows in use, not the capacity: no other row is read, written or copied.
    """

    reads_on_host: ClassVar[bool] = True

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up, self._down = weights.linears()
        self._activation = weights.activation
        num_slots = len(self._down)
        self.rows_per_slot = torch.zeros(num_slots, dtype=torch.int64, device=weights.device)

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[e, C, D]; see `Experts`."""
        assert not apply_weights, "the backend's combine applies the router weights"
        hidden, num_rows = dispatched.hidden, dispatched.num_rows_per_expert
        assert num_rows is not None
        counts: list[int] = num_rows.tolist()
        assert max(counts, default=0) <= hidden.shape[1]
        used = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in used]
        self.rows_per_slot += num_rows
        output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if used:
            self._compute(hidden, output, used, sizes)
        return output

    def _compute(
        self, hidden: torch.Tensor, output: torch.Tensor, used: list[int], sizes: list[int]
    ) -> None:
        parts = [
            self._gate_up[expert](hidden[expert, :size])
            for expert, size in zip(used, sizes, strict=True)
        ]
        # The activation once for all: for one row its call costs as much as the products.
        active = self._activation(torch.cat(parts)).split_with_sizes(sizes)
        for part, expert, size in zip(active, used, sizes, strict=True):
            output[expert, :size] = self._down[expert](part)
