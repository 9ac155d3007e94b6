"""What the KV cache of one rank costs, in blocks and bytes.

A block holds `block_size` tokens. In a model where only some layers see the whole context, the
others (with a window) have blocks of their own, and give back those that no later token sees.
They need so few that there are always enough: `max_window_blocks`.

Legend: S requests, B tokens of a step, W window, K block size.
"""

from dataclasses import dataclass

from moed.config.engine_config import EngineConfig
from moed.config.weight_bytes import BYTES_PER_NUMBER, latent_attention, local_kv_heads
from moed.config.windows import layers_with_own_blocks


@dataclass(frozen=True)
class KVLayout:
    """The blocks of one rank: `num_blocks` of the layers that see all, and those of the others."""

    block_size: int
    block_bytes: int
    """Of a block over all layers that see the whole context."""
    window_block_bytes: int
    """Of a block over the layers with a window; 0 where none has its own blocks."""
    max_window_blocks: int
    formula: str
    """How the bytes of a token are reckoned."""

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, as long as the windows see all."""
        return (self.block_bytes + self.window_block_bytes) // self.block_size

    def num_window_blocks(self, num_blocks: int) -> int:
        """Beside `num_blocks` others: no request holds more of them than of the others."""
        return min(num_blocks, self.max_window_blocks)

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of the whole cache."""
        window = self.num_window_blocks(num_blocks) * self.window_block_bytes
        return num_blocks * self.block_bytes + window

    def num_blocks(self, num_bytes: int) -> int:
        """The most blocks that `num_bytes` hold."""
        num_bytes = max(0, num_bytes)
        both = num_bytes // (self.block_bytes + self.window_block_bytes)
        if both < self.max_window_blocks:
            return both
        return (num_bytes - self.max_window_blocks * self.window_block_bytes) // self.block_bytes

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens in the blocks that `num_bytes` hold."""
        return self.num_blocks(num_bytes) * self.block_size


def kv_layout(config: EngineConfig) -> KVLayout:
    """Of one rank of this configuration."""
    model, size = config.model, BYTES_PER_NUMBER[config.model.dtype]
    block_size, layers = config.cache.block_size, config.model.num_layers
    latent = latent_attention(model)
    if latent is not None:
        text = f"{layers} layers x ({latent.kv_rank} + {latent.rotary_dim}) x {size} B"
        return KVLayout(block_size, layers * latent.row_size * size * block_size, 0, 0, text)
    heads, dim = local_kv_heads(config), model.head_dim
    row = 2 * heads * dim * size
    text = f"{layers} layers x 2 x {heads} KV heads x {dim} x {size} B"
    windows = layers_with_own_blocks(model)
    if windows is None:
        return KVLayout(block_size, layers * row * block_size, 0, 0, text)
    num_windows, size_seen = sum(windows.has_window), windows.window.size
    text += f"; {num_windows} of the layers keep no more than {size_seen} tokens of a request"
    return KVLayout(
        block_size=block_size,
        block_bytes=(layers - num_windows) * row * block_size,
        window_block_bytes=num_windows * row * block_size,
        max_window_blocks=max_window_blocks(config, size_seen),
        formula=text,
    )


def max_window_blocks(config: EngineConfig, window: int) -> int:
    """Blocks that suffice, whatever requests come: between two steps each of S requests holds at
    most the blocks of W - 1 tokens, floor(W / K) + 2 of them, and a step adds those of B tokens
    and one more for each request.
    """
    scheduler, size = config.scheduler, config.cache.block_size
    of_request = window // size + 3
    return scheduler.max_num_seqs * of_request + scheduler.max_num_batched_tokens // size
