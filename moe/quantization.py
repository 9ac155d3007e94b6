"""Formats of quantised weights: which tensors of a file hold a weight, and of what shape.

Legend: N rows and K columns of a weight, G groups of a row. Leading dims may precede, as of the
experts of a layer in one tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moed.config.quantization import FP8_BLOCK_SIZE, MXFP4_GROUP_SIZE, Quantization, StoredFormat
from moed.moe.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_mxfp4

# Of plain weights and of scales. Integers and 8-bit floats are quantised: a plain cast would lose
# their scales.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
NUMBERS_PER_WORD = 8


@dataclass(frozen=True)
class Part:
    """One of the tensors that hold a weight together."""

    suffix: str
    """After the weight's name."""
    dtypes: tuple[str, ...]
    """Served, as safetensors names them."""
    shape: tuple[int, ...]


class StoredWeights(Protocol):
    """A format of quantised weights."""

    label: str
    """In words, for messages."""
    suffixes: tuple[str, ...]
    """All that may follow a weight's name, the numbers themselves first."""
    number_dtype: str
    """Of the numbers; the same name with another dtype is a plain weight."""

    def obstacle(self, shape: Sequence[int]) -> str | None:
        """Why a weight of `shape` cannot lie in this format."""
        ...

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """What must be read for a weight of `shape`, in the order `dequantize` takes."""
        ...

    def dequantize(self, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Float32 of `shape`, new memory."""
        ...


def stored_weights(quantization: Quantization | None) -> StoredWeights | None:
    """The format that `quantization` names; None for plain weights."""
    if quantization is None:
        return None
    if quantization.stored_format is StoredFormat.FP8_BLOCK:
        return Fp8Block()
    if quantization.stored_format is StoredFormat.MXFP4:
        return Mxfp4()
    return Int4Group(quantization.group_size)


class Fp8Block:
    """`X` [N, K] float8_e4m3fn, `X_scale_inv` [ceil(N / 128), ceil(K / 128)] to multiply with: the
    name is that of the inverse that the writer divided by.
    """

    label = "FP8 in blocks of 128 x 128"
    suffixes: tuple[str, ...] = ("", "_scale_inv")
    number_dtype = "F8_E4M3"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return None if len(shape) >= 2 else "it has no blocks"

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        *leading, rows, columns = shape
        blocks = math.ceil(rows / FP8_BLOCK_SIZE[0]), math.ceil(columns / FP8_BLOCK_SIZE[1])
        return (
            Part("", (self.number_dtype,), tuple(shape)),
            Part("_scale_inv", PLAIN_DTYPES, (*leading, *blocks)),
        )

    def dequantize(self, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        return dequantize_fp8_block(*parts)


class Mxfp4:
    """`X_blocks` [N, G, 16] uint8 of two numbers each, `X_scales` [N, G] uint8."""

    label = "MXFP4"
    suffixes: tuple[str, ...] = ("_blocks", "_scales")
    number_dtype = "U8"

    def obstacle(self, shape: Sequence[int]) -> str | None:
        if shape[-1] % MXFP4_GROUP_SIZE:
            return f"{shape[-1]} columns are not a multiple of {MXFP4_GROUP_SIZE}"
        return None

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        groups = (*shape[:-1], shape[-1] // MXFP4_GROUP_SIZE)
        return (
            Part("_blocks", ("U8",), (*groups, MXFP4_GROUP_SIZE // 2)),
            Part("_scales", ("U8",), groups),
        )

    def dequantize(self, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        return dequantize_mxfp4(*parts)


class Int4Group:
    """`X_packed` [N, ceil(K / 8)] int32 of eight numbers each, `X_scale` [N, ceil(K / group)], and
    `X_shape`, which says [N, K] once more and is not read.
    """

    label = "INT4 by groups"
    suffixes: tuple[str, ...] = ("_packed", "_scale", "_shape")
    number_dtype = "I32"

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def obstacle(self, shape: Sequence[int]) -> str | None:
        return None

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        words = math.ceil(shape[-1] / NUMBERS_PER_WORD)
        groups = math.ceil(shape[-1] / self._group_size)
        return (
            Part("_packed", ("I32",), (*shape[:-1], words)),
            Part("_scale", PLAIN_DTYPES, (*shape[:-1], groups)),
        )

    def dequantize(self, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        packed, scales = parts
        return dequantize_int4(packed, scales, shape[-1], self._group_size)
