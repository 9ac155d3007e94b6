"""Experts on rows in the standard format: two grouped products over blocks of rows that share an
expert, then the sum over a row's choices.

Legend: r rows, K top-k, P = r * K pairs, D hidden, I intermediate size, e local experts, b blocks.
A program's axes are (block of rows, block of columns). Blocks of rows that share an expert run one
after the other, so that its weights are still in the cache.
"""

import torch
import triton
import triton.language as tl

from moed.moe.block_scaled import BlockScaled
from moed.moe.kernels.alignment import Alignment
from moed.moe.kernels.launch import Tiling
from moed.moe.kernels.tiles import SCALE_BLOCK, gated_tile, plain_tile


@triton.jit
def _block(pairs, starts, expert, block_starts, BLOCK_M: tl.constexpr):
    """The places in `pairs` [M] of this program's block, which of them exist, and their pairs."""
    places = tl.load(block_starts + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(starts + expert + 1)
    return places.to(tl.int64), is_row, tl.load(pairs + places, mask=is_row, other=0)


@triton.jit
def gate_up_kernel(
    hidden,
    hidden_scales,
    weights,
    weight_scales,
    output,
    pairs,
    starts,
    block_experts,
    block_starts,
    num_experts,
    top_k,
    size,
    depth,
    hidden_stride,
    hidden_scales_stride,
    expert_stride,
    weight_stride,
    expert_scales_stride,
    weight_scales_stride,
    output_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """output[place] = silu(gate) * up of the row of the pair at that place."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= num_experts:
        return
    places, is_row, pair = _block(pairs, starts, expert, block_starts, BLOCK_M)
    rows = pair // top_k
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_column = columns < size
    gate = weights + expert * expert_stride + columns * weight_stride
    gate_scales = (
        weight_scales
        + expert * expert_scales_stride
        + columns // SCALE_BLOCK * weight_scales_stride
    )
    tile = gated_tile(
        hidden + rows * hidden_stride,
        hidden_scales + rows * hidden_scales_stride,
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
        output + places[:, None] * output_stride + columns[None, :],
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
    pairs,
    starts,
    block_experts,
    block_starts,
    num_experts,
    num_columns,
    depth,
    active_stride,
    active_scales_stride,
    expert_stride,
    weight_stride,
    expert_scales_stride,
    weight_scales_stride,
    output_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """output[pair] = active[place] @ down.T, for the pair at each place."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= num_experts:
        return
    places, is_row, pair = _block(pairs, starts, expert, block_starts, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_column = columns < num_columns
    tile = plain_tile(
        active + places * active_stride,
        active_scales + places * active_scales_stride,
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
        output + pair[:, None] * output_stride + columns[None, :],
        tile.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def sum_choices_kernel(
    results,
    ids,
    weights,
    output,
    num_columns,
    top_k,
    results_stride,
    output_stride,
    BLOCK_N: tl.constexpr,
    APPLY_WEIGHTS: tl.constexpr,
):
    """output[row] = the sum over its local choices, in the order of choices, of [weight *] result.

    Results of other choices are garbage, and not read. The axes are (row, block of columns).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in range(0, top_k):
        pair = row * top_k + choice
        is_local = tl.load(ids + pair) >= 0
        mask = (columns < num_columns) & is_local
        result = tl.load(results + pair * results_stride + columns, mask=mask, other=0.0)
        if APPLY_WEIGHTS:
            total += result.to(tl.float32) * tl.load(weights + pair)
        else:
            total += result.to(tl.float32)
    tl.store(
        output + row * output_stride + columns,
        total.to(output.dtype.element_ty),
        mask=columns < num_columns,
    )


def gate_up(
    hidden: BlockScaled,
    weights: BlockScaled,
    alignment: Alignment,
    top_k: int,
    tiling: Tiling,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[P, I] of `dtype`: silu(gate(x)) * up(x), at the places of `alignment.pairs`, for `hidden`
    [r, D] and `weights` [e, 2I, D]; garbage at the places of other ranks.
    """
    num_experts, doubled, depth = weights.values.shape
    output = torch.empty(
        alignment.pairs.shape[0], doubled // 2, dtype=dtype, device=hidden.values.device
    )
    gate_up_kernel[tiling.grid(alignment.block_experts.shape[0], doubled // 2)](
        hidden.values,
        hidden.scales,
        weights.values,
        weights.scales,
        output,
        alignment.pairs,
        alignment.starts,
        alignment.block_experts,
        alignment.block_starts,
        num_experts,
        top_k,
        doubled // 2,
        depth,
        hidden.values.stride(0),
        hidden.scales.stride(0),
        *weights.values.stride()[:2],
        *weights.scales.stride()[:2],
        output.stride(0),
        **tiling.options(weights.values.dtype),
    )
    return output


def down(
    active: BlockScaled,
    weights: BlockScaled,
    alignment: Alignment,
    tiling: Tiling,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[P, D] of `dtype` by pair, for `active` [P, I] by place and `weights` [e, D, I]; garbage for
    the pairs of other ranks.
    """
    num_experts, num_columns, depth = weights.values.shape
    output = torch.empty(
        alignment.pairs.shape[0], num_columns, dtype=dtype, device=active.values.device
    )
    down_kernel[tiling.grid(alignment.block_experts.shape[0], num_columns)](
        active.values,
        active.scales,
        weights.values,
        weights.scales,
        output,
        alignment.pairs,
        alignment.starts,
        alignment.block_experts,
        alignment.block_starts,
        num_experts,
        num_columns,
        depth,
        active.values.stride(0),
        active.scales.stride(0),
        *weights.values.stride()[:2],
        *weights.scales.stride()[:2],
        output.stride(0),
        **tiling.options(weights.values.dtype),
    )
    return output


def sum_choices(
    results: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, apply_weights: bool
) -> torch.Tensor:
    """[r, D] for `results` [P, D] by pair, `ids` [r, K] and `weights` [r, K] float32."""
    (num_rows, top_k), num_columns = ids.shape, results.shape[1]
    output = torch.empty(num_rows, num_columns, dtype=results.dtype, device=results.device)
    if num_rows:
        sum_choices_kernel[(num_rows, triton.cdiv(num_columns, SUM_COLUMNS))](
            results,
            ids.contiguous(),
            weights.contiguous(),
            output,
            num_columns,
            top_k,
            results.stride(0),
            output.stride(0),
            BLOCK_N=SUM_COLUMNS,
            APPLY_WEIGHTS=apply_weights,
        )
    return output


SUM_COLUMNS = 1024
