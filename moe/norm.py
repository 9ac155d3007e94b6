"""Root-mean-square norm."""

import torch
import torch.nn.functional as F

from moed.moe import native
from moed.moe.native.binding import DTYPES, arguments


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dim, in float32, as the checkpoints were trained."""
    library = native.library() if hidden.device.type == "cpu" else None
    if (
        library is None
        or hidden.dtype not in DTYPES
        or weight.dtype != hidden.dtype
        or weight.shape != hidden.shape[1:]
        or not (hidden.is_contiguous() and weight.is_contiguous())
    ):
        # The weight stays outside: the checkpoints' own code rounds to their dtype before it.
        return F.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight
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
