"""Experts on a GPU, on rows in the standard format, through torch's own grouped product.

Legend: r rows, D hidden, K top-k, P = r * K pairs (row, choice), e local experts.
"""

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched
from moed.moe.experts.base import ExpertWeights, silu_and_multiply


class TorchGroupedExperts:
    """Pairs sorted by expert, those of other ranks last, and two grouped products. Nothing waits
    for the device.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up = weights.gate_up.values.transpose(1, 2)
        self._down = weights.down.values.transpose(1, 2)
        self.rows_per_slot = torch.zeros(
            self._down.shape[0], dtype=torch.int64, device=weights.device
        )

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]; see `Experts`."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        num_experts = self._down.shape[0]
        if not num_experts or not ids.numel():
            return torch.zeros_like(hidden)
        flat = ids.flatten()
        keys, pairs = torch.where(flat < 0, num_experts, flat).sort(stable=True)
        experts = torch.arange(num_experts, device=ids.device)
        ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
        self.rows_per_slot += ends.diff(prepend=ends.new_zeros(1))
        rows = torch.div(pairs, ids.shape[1], rounding_mode="floor")
        active = silu_and_multiply(F.grouped_mm(hidden[rows], self._gate_up, offs=ends))
        results = F.grouped_mm(active, self._down, offs=ends)
        # Back in the order of pairs, so that a sum, unlike scattered additions, has one order.
        by_pair = torch.empty_like(results).index_copy_(0, pairs, results)
        # Rows beyond the last group are not computed, and may hold NaN.
        choices = by_pair.view(*ids.shape, -1).masked_fill(ids[..., None] < 0, 0).float()
        if apply_weights:
            choices = choices * weights[..., None]
        return choices.sum(dim=1).to(hidden.dtype)
