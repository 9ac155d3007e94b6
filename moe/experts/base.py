"""What every implementation of experts offers, and the weights that it is given.

Legend: n rows, D hidden, I intermediate size, e local experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts of one rank, in the dtype of the hidden states."""

    gate_up: torch.Tensor
    """[e, 2I, D]: gate rows, then up rows."""
    down: torch.Tensor
    """[e, D, I]."""


class Experts(Protocol):
    """Computes the local experts of dispatched rows."""

    num_rows: int
    """(row, expert) pairs computed since the start."""

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
