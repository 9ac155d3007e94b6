"""What every implementation of experts offers, and the weights that it is given.

Legend: n rows, D hidden, I intermediate size, e local experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import BlockScaled, WeightFormat


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts of one rank."""

    gate_up: BlockScaled
    """[e, 2I, D]: gate rows, then up rows. Scales [e, 2 ceil(I / 128), ceil(D / 128)]: the up
    rows' begin anew, also where the gate's do not fill their last block.
    """
    down: BlockScaled
    """[e, D, I]."""

    @classmethod
    def plain(cls, gate_up: torch.Tensor, down: torch.Tensor) -> "ExpertWeights":
        """In the dtype of the hidden states."""
        return cls(BlockScaled.plain(gate_up), BlockScaled.plain(down))

    @property
    def format(self) -> WeightFormat:
        return WeightFormat.FP8_BLOCK if self.down.is_fp8 else WeightFormat.PLAIN

    @property
    def device(self) -> torch.device:
        return self.down.values.device


class Experts(Protocol):
    """Computes the local experts of dispatched rows."""

    rows_per_slot: torch.Tensor
    """[e] int64, on the device: (row, expert) pairs computed since the start, padding excluded."""

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """The shape and dtype of `dispatched.hidden`. Standard format: for each row the sum over
        its choices that live here, times their router weights when `apply_weights`. Batched
        format: each row through the expert that it lies at, never weighted; rows beyond an
        expert's count are garbage.
        """
        ...


def swiglu(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for `hidden` [n, D]."""
    return F.linear(silu_and_multiply(F.linear(hidden, gate_up)), down)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, I] for [n, 2I]."""
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
