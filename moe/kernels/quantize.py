"""Inputs to FP8: one float32 scale for each row and group of 128 channels.

The scale is amax / 448 with amax at least 1e-4, as DeepEP's transport has it, 448 being the largest
e4m3 number; value * scale gives the input back.
"""

import torch
import triton
import triton.language as tl

from moed.moe.block_scaled import E4M3_MAX, SCALE_BLOCK, BlockScaled

SMALLEST_AMAX = 1e-4


@triton.jit
def quantize_kernel(
    inputs,
    values,
    scales,
    num_rows_per_expert,
    depth,
    inputs_expert_stride,
    inputs_stride,
    values_expert_stride,
    values_stride,
    scales_expert_stride,
    scales_stride,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """The axes are (block of rows, group of channels, expert)."""
    expert = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(num_rows_per_expert + expert)
    if tl.program_id(0) * BLOCK_M >= num_rows:
        return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    channels = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (rows < num_rows)[:, None] & (channels < depth)[None, :]
    places = rows[:, None] * inputs_stride + channels[None, :]
    x = tl.load(inputs + expert * inputs_expert_stride + places, mask=mask, other=0.0)
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST) / LARGEST
    places = rows[:, None] * values_stride + channels[None, :]
    tl.store(
        values + expert * values_expert_stride + places,
        (x / scale[:, None]).to(values.dtype.element_ty),
        mask=mask,
    )
    places = rows * scales_stride + tl.program_id(1)
    tl.store(scales + expert * scales_expert_stride + places, scale, mask=rows < num_rows)


def quantize(inputs: torch.Tensor, num_rows_per_expert: torch.Tensor) -> BlockScaled:
    """For `inputs` [e, C, K] and counts [e] int32; rows beyond a count stay garbage."""
    num_experts, capacity, depth = inputs.shape
    num_groups = triton.cdiv(depth, SCALE_BLOCK)
    device = inputs.device
    values = torch.empty(inputs.shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_experts, capacity, num_groups, dtype=torch.float32, device=device)
    if inputs.numel():
        quantize_kernel[(triton.cdiv(capacity, BLOCK_ROWS), num_groups, num_experts)](
            inputs,
            values,
            scales,
            num_rows_per_expert,
            depth,
            *inputs.stride()[:2],
            *values.stride()[:2],
            *scales.stride()[:2],
            BLOCK_M=BLOCK_ROWS,
            GROUP=SCALE_BLOCK,
            LARGEST=E4M3_MAX,
            SMALLEST=SMALLEST_AMAX,
        )
    return BlockScaled(values, scales)


BLOCK_ROWS = 16


def reference_quantize(inputs: torch.Tensor) -> BlockScaled:
    """What `quantize` makes of [rows, K], one group at a time."""
    rows, depth = inputs.shape
    values = torch.empty(rows, depth, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, -(-depth // SCALE_BLOCK))
    for group, start in enumerate(range(0, depth, SCALE_BLOCK)):
        x = inputs[:, start : start + SCALE_BLOCK].float()
        scales[:, group] = x.abs().amax(dim=1).clamp(min=SMALLEST_AMAX) / E4M3_MAX
        values[:, start : start + SCALE_BLOCK] = (x / scales[:, group, None]).to(values.dtype)
    return BlockScaled(values, scales)
