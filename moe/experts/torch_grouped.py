"""Experts on a GPU, on rows in the standard format, through torch's own grouped product.

Legend: r rows, D hidden, K top-k, P = r * K pairs (row, choice), e local experts.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched
from moed.moe.experts.base import ExpertWeights


class TorchGroupedExperts:
    """Pairs sorted by expert, those of other ranks last, and two grouped products. Nothing waits
    for the device.
    """

    reads_on_host: ClassVar[bool] = False

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up_bias = _with_zeros(weights.gate_up_bias)
        self._down_bias = _with_zeros(weights.down_bias)
        self._activation = weights.activation
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
        product = F.grouped_mm(hidden[rows], self._gate_up, offs=ends)
        if self._gate_up_bias is not None:
            product = product + self._gate_up_bias[keys]
        results = F.grouped_mm(self._activation(product), self._down, offs=ends)
        if self._down_bias is not None:
            results = results + self._down_bias[keys]
        # Back in the order of pairs, so that a sum, unlike scattered additions, has one order.
        by_pair = torch.empty_like(results).index_copy_(0, pairs, results)
        # Rows beyond the last group are not computed, and may hold NaN.
        choices = by_pair.view(*ids.shape, -1).masked_fill(ids[..., None] < 0, 0).float()
        if apply_weights:
            choices = choices * weights[..., None]
        return choices.sum(dim=1).to(hidden.dtype)


def _with_zeros(bias: torch.Tensor | None) -> torch.Tensor | None:
    """[e + 1, N]: a row more, for pairs of other ranks."""
    return None if bias is None else F.pad(bias, (0, 0, 0, 1))
