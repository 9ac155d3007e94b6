"""Experts on rows in the batched format: two products that read the counts on the device.

Legend: e local experts, C capacity per expert, D hidden, I intermediate size. A program's axes are
(block of rows, block of columns, expert). Those beyond an expert's count return at once, so that
cost follows the counts, which the host never learns.
"""

import torch
import triton
import triton.language as tl

from moed.moe.block_scaled import BlockScaled
from moed.moe.kernels.launch import Tiling
from moed.moe.kernels.tiles import SCALE_BLOCK, gated_tile, plain_tile


@triton.jit
def gate_up_kernel(
    hidden,
    hidden_scales,
    weights,
    weight_scales,
    output,
    num_rows_per_expert,
    size,
    depth,
    hidden_expert_stride,
    hidden_stride,
    hidden_scales_expert_stride,
    hidden_scales_stride,
    expert_stride,
    weight_stride,
    expert_scales_stride,
    weight_scales_stride,
    output_expert_stride,
    output_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """output[expert, row] = silu(gate) * up."""
    expert = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(num_rows_per_expert + expert)
    if tl.program_id(0) * BLOCK_M >= num_rows:
        return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < size
    gate = weights + expert * expert_stride + columns * weight_stride
    gate_scales = (
        weight_scales
        + expert * expert_scales_stride
        + columns // SCALE_BLOCK * weight_scales_stride
    )
    tile = gated_tile(
        hidden + expert * hidden_expert_stride + rows * hidden_stride,
        hidden_scales + expert * hidden_scales_expert_stride + rows * hidden_scales_stride,
        is_row,
        gate,
        gate_scales,
        gate + size * weight_stride,
        gate_scales + tl.cdiv(size, SCALE_BLOCK) * weight_scales_stride,
        is_column,
        depth,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        IS_FP8,
    )
    tl.store(
        output + expert * output_expert_stride + rows[:, None] * output_stride + columns[None, :],
        tile.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def down_kernel(
    active,
    active_scales,
    weights,
    weight_scales,
    output,
    num_rows_per_expert,
    num_columns,
    depth,
    active_expert_stride,
    active_stride,
    active_scales_expert_stride,
    active_scales_stride,
    expert_stride,
    weight_stride,
    expert_scales_stride,
    weight_scales_stride,
    output_expert_stride,
    output_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """output[expert, row] = active[expert, row] @ down.T."""
    expert = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(num_rows_per_expert + expert)
    if tl.program_id(0) * BLOCK_M >= num_rows:
        return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < num_columns
    tile = plain_tile(
        active + expert * active_expert_stride + rows * active_stride,
        active_scales + expert * active_scales_expert_stride + rows * active_scales_stride,
        is_row,
        weights + expert * expert_stride + columns * weight_stride,
        weight_scales
        + expert * expert_scales_stride
        + columns // SCALE_BLOCK * weight_scales_stride,
        is_column,
        depth,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        IS_FP8,
    )
    tl.store(
        output + expert * output_expert_stride + rows[:, None] * output_stride + columns[None, :],
        tile.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


def gate_up(
    hidden: BlockScaled,
    weights: BlockScaled,
    num_rows_per_expert: torch.Tensor,
    output: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Into `output` [e, C, I]: silu(gate(x)) * up(x), for `hidden` [e, C, D], `weights` [e, 2I, D]
    and `num_rows_per_expert` [e] int32. Rows beyond an expert's count are left as they are.
    """
    _launch(gate_up_kernel, hidden, weights, num_rows_per_expert, output, tiling)


def down(
    active: BlockScaled,
    weights: BlockScaled,
    num_rows_per_expert: torch.Tensor,
    output: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Into `output` [e, C, D], for `active` [e, C, I] and `weights` [e, D, I]; see `gate_up`."""
    _launch(down_kernel, active, weights, num_rows_per_expert, output, tiling)


def _launch(
    kernel: triton.JITFunction,
    inputs: BlockScaled,
    weights: BlockScaled,
    num_rows_per_expert: torch.Tensor,
    output: torch.Tensor,
    tiling: Tiling,
) -> None:
    num_experts, capacity, num_columns = output.shape
    if output.numel() == 0:
        return
    row_blocks = triton.cdiv(capacity, tiling.block_rows)
    kernel[(*tiling.grid(row_blocks, num_columns), num_experts)](
        inputs.values,
        inputs.scales,
        weights.values,
        weights.scales,
        output,
        num_rows_per_expert,
        num_columns,
        weights.values.shape[2],
        *inputs.values.stride()[:2],
        *inputs.scales.stride()[:2],
        *weights.values.stride()[:2],
        *weights.scales.stride()[:2],
        *output.stride()[:2],
        **tiling.options(weights.values.dtype),
    )
