"""Numbers in 8 bits with a scale per block, or plain numbers where the same is asked for."""

from dataclasses import dataclass
from enum import StrEnum

import torch

# Channels of inputs, and rows and columns of weights, that share a scale: DeepSeek-V3's choice.
SCALE_BLOCK = 128
E4M3_MAX = 448.0
"""The largest number of float8_e4m3fn."""


class WeightFormat(StrEnum):
    """How the experts' weights lie in memory while they are computed with."""

    PLAIN = "plain"
    """In the dtype of the hidden states."""
    FP8_BLOCK = "fp8_block"
    """float8_e4m3fn with a float32 scale for each block of 128 x 128."""


@dataclass(frozen=True)
class BlockScaled:
    """A tensor, plain or FP8. The last dim is contiguous; strides of the others are free."""

    values: torch.Tensor
    """[..., rows, K] in float32, float16, bfloat16 or float8_e4m3fn."""
    scales: torch.Tensor
    """With FP8, float32 to multiply with: [..., rows, ceil(K / 128)] of inputs,
    [e, ceil(rows / 128), ceil(K / 128)] of weights. Otherwise anything of as many dims.
    """

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == torch.float8_e4m3fn

    @classmethod
    def plain(cls, values: torch.Tensor) -> "BlockScaled":
        return cls(values, values)
