"""Experts on a CPU, on rows in the standard format.

Legend: r rows, D hidden, K top-k, e local experts, I intermediate size, p (row, expert) pairs whose
expert lives here.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts.base import ExpertWeights
from moed.moe.linear import Linear


class TorchExperts:
    """Rows sorted by expert, then two matrix products per expert that has rows.

    Cost follows the rows: an expert without rows, and padding, cost nothing.
    """

    reads_on_host: ClassVar[bool] = True

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up, self._down = weights.linears()
        self._activation = weights.activation
        num_slots = len(self._down)
        self.rows_per_slot = torch.zeros(num_slots, dtype=torch.int64, device=weights.device)

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]: for each row the sum over its choices that live here."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        flat = ids.flatten()
        # Choices of other ranks, id -1, sort first.
        found = torch.bincount(flat + 1, minlength=len(self._down) + 1)
        self.rows_per_slot += found[1:]
        counts = found.tolist()
        pairs = torch.argsort(flat, stable=True)[counts[0] :]
        # Float32, since a row sums up to K contributions.
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if pairs.shape[0]:
            rows = torch.div(pairs, ids.shape[1], rounding_mode="floor")
            results = self._compute(hidden[rows], counts[1:]).float()
            if apply_weights:
                results = results * weights.flatten()[pairs, None]
            output.index_add_(0, rows, results)
        return output.to(hidden.dtype)

    def _compute(self, hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[p, D] for `hidden` [p, D] in the order of experts, of which each has its count."""
        used = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in used]

        def multiply(inputs: torch.Tensor, weights: Sequence[Linear]) -> torch.Tensor:
            parts = zip(inputs.split_with_sizes(sizes), used, strict=True)
            return torch.cat([weights[expert](part) for part, expert in parts])

        # The activation once for all: for one row its call costs as much as the products.
        return multiply(self._activation(multiply(hidden, self._gate_up)), self._down)
