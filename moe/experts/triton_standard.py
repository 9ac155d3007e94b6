"""Experts on a GPU, on rows in the standard format, without waiting for the device.

Legend: r rows, D hidden, K top-k, P = r * K pairs (row, choice).
"""

from typing import ClassVar

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import BlockScaled
from moed.moe.experts.base import ExpertWeights
from moed.moe.kernels import grouped
from moed.moe.kernels.alignment import align
from moed.moe.kernels.launch import tiling_for
from moed.moe.kernels.quantize import quantize


class TritonExperts:
    """Pairs sorted by expert, two grouped products over blocks of pairs that share an expert, and
    the sum over each row's choices. With FP8 weights, inputs of both products are quantised.
    """

    reads_on_host: ClassVar[bool] = False

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up, self._down = weights.gate_up, weights.down
        num_slots = weights.down.values.shape[0]
        self.rows_per_slot = torch.zeros(num_slots, dtype=torch.int64, device=weights.device)

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]; see `Experts`."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        num_experts, top_k = self._down.values.shape[0], ids.shape[1]
        if not num_experts or not ids.numel():
            return torch.zeros_like(hidden)
        tiling = tiling_for(-(-ids.numel() // num_experts))
        alignment = align(ids, num_experts, tiling.block_rows)
        num_pairs = alignment.starts[-1:]
        self.rows_per_slot += alignment.starts.diff()
        rows = self._inputs(hidden, torch.full_like(num_pairs, hidden.shape[0]))
        active = grouped.gate_up(rows, self._gate_up, alignment, top_k, tiling, hidden.dtype)
        places = self._inputs(active, num_pairs)
        results = grouped.down(places, self._down, alignment, tiling, hidden.dtype)
        return grouped.sum_choices(results, ids, weights, apply_weights)

    def _inputs(self, rows: torch.Tensor, num_rows: torch.Tensor) -> BlockScaled:
        """[n, K], of which the first `num_rows` [1] int32 are needed."""
        if not self._down.is_fp8:
            return BlockScaled.plain(rows)
        quantized = quantize(rows[None], num_rows)
        return BlockScaled(quantized.values[0], quantized.scales[0])
