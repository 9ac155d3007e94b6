"""Norms over the last dim, in float32, as the checkpoints were trained."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """By the root of the mean square; `weight` None: of ones."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], None, eps)
    # The weight stays outside: the checkpoints' own code rounds to their dtype before it.
    return normed if weight is None else normed * weight


@dataclass(frozen=True)
class Norm:
    """Of hidden states [..., D]."""

    weight: torch.Tensor
    """[D]."""
    bias: torch.Tensor | None
    """[D]; None: the norm is by the mean square, with it by mean and variance (LayerNorm)."""
    eps: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(hidden, self.weight, self.eps)
        return F.layer_norm(hidden, hidden.shape[-1:], self.weight, self.bias, self.eps)
