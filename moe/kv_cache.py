"""The paged KV cache of one rank: per layer, blocks of K and V rows."""

import torch

from moed.config.engine_config import ModelConfig


def kv_bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: 2 (K, V) x layers x tokens x kv heads x head dim."""
    row = model.num_kv_heads * model.head_dim * dtype.itemsize
    return 2 * model.num_layers * block_size * row


class KVCache:
    """`keys[l]` and `values[l]` are [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
        # Zeros, not garbage: padded gathers read rows that were never written, and NaN there would
        # survive a mask.
        self.keys = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)
        ]
        self.values = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)
        ]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Put `key`, `value` [T, kv_heads, head_dim] at `slots` [T] (block, then offset)."""
        self.keys[layer].flatten(0, 1)[slots] = key
        self.values[layer].flatten(0, 1)[slots] = value
