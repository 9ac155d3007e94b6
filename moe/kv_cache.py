"""The paged cache of one rank: per layer, blocks of K and V rows, or of latent rows (MLA).

Legend: T tokens, P blocks, G KV heads, d head dim, L latent size.
"""

import numpy as np
import torch

from moed.config.engine_config import ModelConfig
from moed.config.weight_bytes import latent_attention
from moed.config.windows import layers_with_own_blocks


def local_kv_heads(model: ModelConfig, tensor_parallel_size: int) -> int:
    """G: KV heads of one process; where there are fewer than processes, several hold the same."""
    return max(1, model.num_kv_heads // tensor_parallel_size)


class KVCache:
    """`keys[l]` and `values[l]` are [num_blocks, block_size, G, d]; [num_window_blocks, …] where
    some layers have a window and l is one of them.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_kv_heads: int,
        num_blocks: int,
        num_window_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        windows, numbers = layers_with_own_blocks(model), [num_blocks] * model.num_layers
        if windows is not None:
            numbers = [num_window_blocks if own else num_blocks for own in windows.has_window]
        shapes = [(number, block_size, num_kv_heads, model.head_dim) for number in numbers]
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]
        self._rows = [
            (keys.flatten(0, 1), values.flatten(0, 1))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Put `key`, `value` [T, G, d] at `slots` [T] (block id x block size + offset)."""
        keys, values = self._rows[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values, each [P x block_size, G, d], of `blocks` [P]."""
        keys = self.keys[layer].index_select(0, blocks)
        values = self.values[layer].index_select(0, blocks)
        return keys.flatten(0, 1), values.flatten(0, 1)


class LatentCache:
    """`rows[l]` is [num_blocks, block_size, L]: one row a token, of which each head makes its own
    K and V.
    """

    def __init__(
        self,
        row_size: int,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`row_size`: L."""
        self.block_size = block_size
        shape = (num_blocks, block_size, row_size)
        self.rows = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def write(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Put `rows` [T, L] at `slots` [T] (block id x block size + offset)."""
        self.rows[layer].flatten(0, 1).index_copy_(0, slots, rows)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of the rows [P x block_size, L] of `blocks` [P]."""
        return self.rows[layer].index_select(0, blocks).flatten(0, 1)


def make_kv_cache(
    model: ModelConfig,
    num_kv_heads: int,
    num_blocks: int,
    num_window_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache | LatentCache:
    """The kind that the model's attention needs; a latent row is held whole by each process."""
    latent = latent_attention(model)
    if latent is None:
        return KVCache(
            model, num_kv_heads, num_blocks, num_window_blocks, block_size, dtype, device
        )
    return LatentCache(latent.row_size, model.num_layers, num_blocks, block_size, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: padded gathers read rows that were never written, and NaN there would
    survive a mask.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are the system's untouched pages, where torch would write each one: a large
    # cache then costs its time and memory only as it is used.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
