"""What every implementation of experts offers, and the weights that it is given.

Legend: n rows, D hidden, I intermediate size, e local experts.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import BlockScaled, WeightFormat
from moed.moe.linear import Linear


@dataclass(frozen=True)
class Activation:
    """Between the two products; SwiGLU, as nearly all families have it, unless `limit` is set."""

    limit: float | None = None
    """gpt-oss: the gate is at most this, up is within plus and minus this, and 1 is added to it."""
    steepness: float = 1.0
    """Of the gate's sigmoid."""

    @property
    def is_plain(self) -> bool:
        return self.limit is None and self.steepness == 1.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, I] for [n, 2I]: gate's columns, then up's."""
        size = gate_up.shape[1] // 2
        gate, up = gate_up[:, :size], gate_up[:, size:]
        if self.limit is None:
            return F.silu(gate).mul_(up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.steepness) * (up + 1)


SWIGLU = Activation()


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts of one rank."""

    gate_up: BlockScaled
    """[e, 2I, D]: gate rows, then up rows. Scales [e, 2 ceil(I / 128), ceil(D / 128)]: the up
    rows' begin anew, also where the gate's do not fill their last block.
    """
    down: BlockScaled
    """[e, D, I]."""
    gate_up_bias: torch.Tensor | None = None
    """[e, 2I]."""
    down_bias: torch.Tensor | None = None
    """[e, D]."""
    activation: Activation = SWIGLU

    @property
    def is_plain_swiglu(self) -> bool:
        """Without biases, and with the common activation."""
        return self.gate_up_bias is None and self.down_bias is None and self.activation.is_plain

    def linears(self) -> tuple[list[Linear], list[Linear]]:
        """Gate and up, and down, one by one for each expert."""

        def made(weights: BlockScaled, bias: torch.Tensor | None) -> list[Linear]:
            biases = [None] * len(weights.values) if bias is None else bias.unbind()
            pairs = zip(weights.values.unbind(), biases, strict=True)
            return [Linear(weight, own) for weight, own in pairs]

        return made(self.gate_up, self.gate_up_bias), made(self.down, self.down_bias)

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
    reads_on_host: ClassVar[bool]
    """It waits for counts that the device made, which a CUDA graph cannot hold."""

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """The shape and dtype of `dispatched.hidden`. Standard format: for each row the sum over
        its choices that live here, times their router weights when `apply_weights`. Batched
        format: each row through the expert that it lies at, never weighted; rows beyond an
        expert's count are garbage.
        """
        ...


def swiglu(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for `hidden` [n, D]."""
    return F.linear(SWIGLU(F.linear(hidden, gate_up)), down)
