"""Rows in 8-bit floats, with one scale for 128 channels of a token, as DeepEP's kernels make them.

T tokens, H hidden size.
"""

import torch

from moed.config.deep_ep_limits import ALIGNMENT_CHANNELS

MAX_VALUE = 448.0
MIN_AMAX = 1e-4
FLOAT32_FRACTION_BITS = 23


def quantize(x: torch.Tensor, *, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] float8_e4m3fn and scales [T, H / 128] float32: their product is about `x` [T, H].

    `round_scale`: scales are powers of two.
    """
    num_tokens, hidden_size = x.shape
    groups = x.float().view(num_tokens, hidden_size // ALIGNMENT_CHANNELS, ALIGNMENT_CHANNELS)
    amax = groups.abs().amax(dim=2).clamp(min=MIN_AMAX)
    scales = amax / MAX_VALUE
    if round_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    data = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return data.view(num_tokens, hidden_size), scales


def dequantize(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., H] float32 from data [..., H] and scales [..., H / 128] float32 or [..., H / 512]
    int32.
    """
    factors = unpack_ue8m0(scales) if scales.dtype == torch.int32 else scales
    return data.float() * factors.repeat_interleave(ALIGNMENT_CHANNELS, dim=-1)


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """[..., g] powers of two to [..., g / 4] int32: exponents, the first in the lowest byte."""
    exponents = (scales.contiguous().view(torch.int32) >> FLOAT32_FRACTION_BITS).to(torch.uint8)
    return exponents.view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_ue8m0`, for any strides."""
    exponents = packed.contiguous().view(torch.uint8).int() << FLOAT32_FRACTION_BITS
    return exponents.view(torch.float32)
