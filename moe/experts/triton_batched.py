"""Experts on a GPU, on rows in the batched format, without waiting for the device.

Legend: e local experts, C capacity per expert, D hidden, I intermediate size.
"""

from typing import ClassVar

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import BlockScaled
from moed.moe.experts.base import ExpertWeights
from moed.moe.kernels import masked
from moed.moe.kernels.launch import tiling_for
from moed.moe.kernels.quantize import quantize


class TritonBatchedExperts:
    """Two products masked by the counts, which stay on the device. With FP8 weights, inputs of
    both are quantised, masked too.
    """

    reads_on_host: ClassVar[bool] = False

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up, self._down = weights.gate_up, weights.down
        num_slots = weights.down.values.shape[0]
        self.rows_per_slot = torch.zeros(num_slots, dtype=torch.int64, device=weights.device)

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[e, C, D]; see `Experts`."""
        assert not apply_weights, "the backend's combine applies the router weights"
        hidden, num_rows = dispatched.hidden, dispatched.num_rows_per_expert
        assert num_rows is not None
        self.rows_per_slot += num_rows
        num_experts, capacity, _ = hidden.shape
        size = self._down.values.shape[2]
        # The counts are unknown here; most experts see a small part of the capacity.
        tiling = tiling_for(capacity // 4)
        active = hidden.new_empty(num_experts, capacity, size)
        masked.gate_up(self._inputs(hidden, num_rows), self._gate_up, num_rows, active, tiling)
        output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        masked.down(self._inputs(active, num_rows), self._down, num_rows, output, tiling)
        return output

    def _inputs(self, rows: torch.Tensor, num_rows: torch.Tensor) -> BlockScaled:
        return quantize(rows, num_rows) if self._down.is_fp8 else BlockScaled.plain(rows)
