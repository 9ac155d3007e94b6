"""Quantised weights back to float32, one tensor at a time.

Legend: N rows and K columns of a weight, G groups of a row. Leading dims may precede, as of the
experts of a layer in one tensor. Beside each stands a reference for [N, K], number by number.
"""

import torch

from moed.config.quantization import FP8_BLOCK_SIZE, MXFP4_GROUP_SIZE

# Sign, two bits of exponent, one of mantissa, in the order of their bits.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255
INT4_OFFSET = 8


def dequantize_fp8_block(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 for `values` [..., N, K] float8_e4m3fn and `scales` of each block of 128 x 128."""
    rows, columns = FP8_BLOCK_SIZE
    by_row = scales.float().repeat_interleave(rows, dim=-2)[..., : values.shape[-2], :]
    return _scale_groups(values.float(), by_row, columns)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [..., 32 G] for `blocks` [..., G, 16] and `scales` [..., G], both uint8.

    A byte holds two e2m1 numbers, that of the lower column in its lower half. A scale s is
    2^(s - 127), and NaN for 255.
    """
    table = torch.tensor(E2M1_VALUES, device=blocks.device)
    table = torch.cat([table, -table])
    numbers = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], dim=-1)
    exponents = (scales.int() - E8M0_BIAS)[..., None]
    scaled = torch.ldexp(numbers.flatten(-2), exponents)
    scaled.masked_fill_((scales == E8M0_NAN)[..., None], torch.nan)
    return scaled.flatten(-2)


def dequantize_int4(
    packed: torch.Tensor, scales: torch.Tensor, num_columns: int, group_size: int
) -> torch.Tensor:
    """Float32 [..., K] for `packed` [..., ceil(K / 8)] int32 and `scales` [..., ceil(K / group)].

    Column k lies in word k // 8 from bit 4 (k % 8) on, 8 being zero.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    numbers = ((packed[..., None] >> shifts) & 15) - INT4_OFFSET
    return _scale_groups(numbers.flatten(-2)[..., :num_columns].float(), scales.float(), group_size)


def _scale_groups(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """`values` [..., N, K], multiplied in place by `scales` [..., N, ceil(K / group_size)]."""
    for group in range(scales.shape[-1]):
        columns = slice(group * group_size, (group + 1) * group_size)
        values[..., columns] *= scales[..., group, None]
    return values


def reference_fp8_block(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `dequantize_fp8_block` returns."""
    result = torch.empty(values.shape)
    block_rows, block_columns = FP8_BLOCK_SIZE
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            scale = scales[row // block_rows, column // block_columns].float()
            result[row, column] = values[row, column].float() * scale
    return result


def reference_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `dequantize_mxfp4` returns."""
    rows, groups, _ = blocks.shape
    result = torch.empty(rows, groups * MXFP4_GROUP_SIZE)
    for row in range(rows):
        for column in range(result.shape[1]):
            group, place = divmod(column, MXFP4_GROUP_SIZE)
            byte = int(blocks[row, group, place // 2])
            bits = byte >> 4 if place % 2 else byte & 15
            number = E2M1_VALUES[bits & 7] * (-1.0 if bits & 8 else 1.0)
            result[row, column] = number * 2.0 ** (int(scales[row, group]) - E8M0_BIAS)
    return result


def reference_int4(
    packed: torch.Tensor, scales: torch.Tensor, num_columns: int, group_size: int
) -> torch.Tensor:
    """What `dequantize_int4` returns."""
    result = torch.empty(packed.shape[0], num_columns)
    for row in range(packed.shape[0]):
        for column in range(num_columns):
            word = int(packed[row, column // 8])
            number = (word >> 4 * (column % 8) & 15) - INT4_OFFSET
            result[row, column] = number * scales[row, column // group_size].float()
    return result
