"""Weights as the native kernels read them, see matmul.h.

Legend: N outputs, K inputs; s numbers to a unit of 4 bytes: 2 in bfloat16, 1 in float32.
"""

import torch

from moed.moe.native.binding import DTYPES, Library

LANES = 16
UNIT_BYTES = 4


def can_pack(weight: torch.Tensor) -> bool:
    """Whether there are kernels for `weight` [..., N, K]."""
    return bool(weight.numel()) and can_pack_like(weight.device, weight.dtype, weight.shape[-1])


def can_pack_like(device: torch.device, dtype: torch.dtype, num_inputs: int) -> bool:
    """Whether there are kernels for weights of K = `num_inputs`."""
    if device.type != "cpu" or dtype not in DTYPES:
        return False
    # In bfloat16 numbers are taken in pairs.
    return num_inputs * dtype.itemsize % UNIT_BYTES == 0


def padded(num_outputs: int) -> int:
    """N, filled up to whole groups."""
    return -(-num_outputs // LANES) * LANES


def empty_packed(
    leading: tuple[int, ...], num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    """[*leading, ceil(N / 16), K / s, 16, s], not filled."""
    per_unit = UNIT_BYTES // dtype.itemsize
    num_groups = padded(num_outputs) // LANES
    return torch.empty((*leading, num_groups, num_inputs // per_unit, LANES, per_unit), dtype=dtype)


def pack(library: Library, weight: torch.Tensor) -> torch.Tensor:
    """[ceil(N / 16), K / s, 16, s], zeros below N, for `weight` [N, K]. New memory."""
    num_outputs, num_inputs = weight.shape
    packed = empty_packed((), num_outputs, num_inputs, weight.dtype)
    pack_into(library, weight, packed)
    return packed


def pack_into(library: Library, weight: torch.Tensor, packed: torch.Tensor) -> None:
    """The same into `packed`, whose groups may lie apart."""
    assert weight.dtype == packed.dtype and weight.device.type == packed.device.type == "cpu"
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    (num_outputs, num_inputs), size = weight.shape, weight.dtype.itemsize
    units = num_inputs * size // UNIT_BYTES
    assert packed.shape[:3] == (padded(num_outputs) // LANES, units, LANES)
    assert packed[0].is_contiguous()
    library.pack(
        None,
        weight.data_ptr(),
        weight.stride(0) * size,
        num_outputs,
        units,
        packed.data_ptr(),
        packed.stride(0) * size,
    )
