"""One tile of inputs times transposed weights, accumulated in float32: what all kernels here share.

Legend: M rows and N columns of a tile, K the depth of the product, walked BLOCK_K at a time. `rows`
and `columns` are pointers [M] and [N] to where the rows of inputs and of weights begin, and
`row_scales` and `column_scales` to where those of their scales do.

FP8 weights carry one float32 scale per block of 128 x 128, and inputs one per row and group of 128
channels, as DeepSeek-V3 defined them: so BLOCK_K is 128 there, and each step's product is scaled
before it is added. Otherwise the two pointers to scales are any numbers, never followed.
"""

import triton
import triton.language as tl

from moed.moe import block_scaled

SCALE_BLOCK = tl.constexpr(block_scaled.SCALE_BLOCK)


@triton.jit
def load_rows(rows, is_row, start, depth, BLOCK_K: tl.constexpr):
    """[M, BLOCK_K] from channel `start` on, zero outside."""
    k = start + tl.arange(0, BLOCK_K)
    mask = is_row[:, None] & (k < depth)[None, :]
    return tl.load(rows[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def multiply_add(
    accumulator,
    inputs,
    row_scales,
    is_row,
    columns,
    column_scales,
    is_column,
    start,
    depth,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """`accumulator` [M, N] plus `inputs` [M, BLOCK_K] times the weights of the same channels."""
    weights = tl.trans(load_rows(columns, is_column, start, depth, BLOCK_K))
    if IS_FP8:
        group = start // SCALE_BLOCK
        input_scale = tl.load(row_scales + group, mask=is_row, other=0.0)
        weight_scale = tl.load(column_scales + group, mask=is_column, other=0.0)
        accumulator += tl.dot(inputs, weights) * (input_scale[:, None] * weight_scale[None, :])
    else:
        # "ieee": float32 stays float32, instead of 10 bits of mantissa.
        accumulator = tl.dot(inputs, weights, accumulator, input_precision="ieee")
    return accumulator


@triton.jit
def gated_tile(
    rows,
    row_scales,
    is_row,
    gate,
    gate_scales,
    up,
    up_scales,
    is_column,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """silu(x @ gate.T) * (x @ up.T), [M, N] float32, from one walk over x; `gate` and `up` are
    pointers as `columns` are.
    """
    gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    linear = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        x = load_rows(rows, is_row, start, depth, BLOCK_K)
        gated = multiply_add(
            gated,
            x,
            row_scales,
            is_row,
            gate,
            gate_scales,
            is_column,
            start,
            depth,
            BLOCK_K,
            IS_FP8,
        )
        linear = multiply_add(
            linear, x, row_scales, is_row, up, up_scales, is_column, start, depth, BLOCK_K, IS_FP8
        )
    return gated * tl.sigmoid(gated) * linear


@triton.jit
def plain_tile(
    rows,
    row_scales,
    is_row,
    columns,
    column_scales,
    is_column,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """x @ weights.T, [M, N] float32."""
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        x = load_rows(rows, is_row, start, depth, BLOCK_K)
        product = multiply_add(
            product,
            x,
            row_scales,
            is_row,
            columns,
            column_scales,
            is_column,
            start,
            depth,
            BLOCK_K,
            IS_FP8,
        )
    return product
