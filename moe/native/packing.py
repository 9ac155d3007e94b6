"""Weights as the native kernels read them, see matmul.h.

Legend: N outputs, K inputs, e experts, I intermediate size.
"""

import torch

from moed.moe.native.binding import DTYPES

LANES = 16


def can_pack(weight: torch.Tensor) -> bool:
    """Whether there are kernels for `weight` [..., N, K]."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or not weight.numel():
        return False
    # In bfloat16 numbers are taken in pairs.
    return weight.dtype == torch.float32 or weight.shape[-1] % 2 == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[..., ceil(N / 16), K / s, 16, s], zeros below N, for `weight` [..., N, K]; s is 2 in
    bfloat16, else 1. New memory.
    """
    *leading, num_outputs, _ = weight.shape
    num_groups = -(-num_outputs // LANES)
    # One number, or one pair of numbers.
    units = weight.contiguous().view(torch.int32)
    packed = units.new_zeros(*leading, num_groups, units.shape[-1], LANES)
    whole = num_outputs // LANES
    rows = units[..., : whole * LANES, :].reshape(*leading, whole, LANES, units.shape[-1])
    packed[..., :whole, :, :] = rows.transpose(-1, -2)
    if whole < num_groups:
        rest = units[..., whole * LANES :, :].transpose(-1, -2)
        packed[..., whole, :, : num_outputs - whole * LANES] = rest
    return packed.view(weight.dtype)


def pack_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Groups of gate and of up in turn: [e, ceil(I / 16), 2, K / s, 16, s] for `gate_up`
    [e, 2I, K].
    """
    gate, up = gate_up.reshape(len(gate_up), 2, -1, gate_up.shape[-1]).unbind(1)
    return torch.stack([pack(gate), pack(up)], dim=2)
