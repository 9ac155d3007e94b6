"""Norms over the last dim, in float32, as the checkpoints were trained."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moed.moe import native
from moed.moe.native.binding import DTYPES, Library, arguments


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """By the root of the mean square; `weight` None: of ones."""
    library = native.library() if hidden.device.type == "cpu" else None
    if library is not None and weight is not None and _can_norm(hidden, weight):
        return _native_norm(library, hidden, weight, eps)
    normed = F.rms_norm(hidden, hidden.shape[-1:], None, eps)
    # The weight stays outside: the checkpoints' own code rounds to their dtype before it.
    return normed if weight is None else normed * weight


def _can_norm(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        hidden.dim() == 2
        and hidden.dtype in DTYPES
        and weight.dtype == hidden.dtype
        and weight.shape == hidden.shape[1:]
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


def _native_norm(
    library: Library, hidden: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty_like(hidden)
    library.norm(
        arguments(hidden.dtype),
        hidden.data_ptr(),
        weight.data_ptr(),
        *hidden.shape,
        eps,
        out.data_ptr(),
    )
    return out


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
