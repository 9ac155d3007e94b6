"""Root-mean-square norm."""

import torch
import torch.nn.functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dim, in float32, as the checkpoints were trained."""
    # The weight stays outside: the checkpoints' own code rounds to their dtype before it.
    return F.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight
