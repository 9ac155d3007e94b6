"""What attention takes during a step, beyond the cache itself.

torch's copies the blocks of the requests that it computes, layer by layer, and holds a mask for
each piece of a prompt; FlashInfer reads the cache where it lies, and has fixed buffers.

Legend: B tokens of a step, S requests, L the greatest length of one.
"""

from moed.config.attention import (
    FLASHINFER,
    LATENT_EXPANDED_BYTES,
    PLAN_BYTES,
    SDPA,
    SINK_MASK_NUMBERS,
    WITH_SINKS,
    WORKSPACE_BYTES,
)
from moed.config.engine_config import EngineConfig
from moed.config.graphs import MAX_GRAPH_KV_ROWS
from moed.config.items import Item, total
from moed.config.weight_bytes import BYTES_PER_NUMBER, latent_attention, local_kv_heads
from moed.config.windows import layers_with_own_blocks

MASK_BOOLS = 2
"""A mask is made of as many comparisons, a byte for each number."""


def attention_items(config: EngineConfig) -> list[Item]:
    """Of the backend; where the start decides between two, of the one that takes more."""
    match config.runner.attention_backend:
        case "sdpa":
            return _torchs(config)
        case "flashinfer":
            return _flashinfers(config)
        case _:
            return max(_torchs(config), _flashinfers(config), key=total)


def _flashinfers(config: EngineConfig) -> list[Item]:
    num_wrappers = 2 + len(config.runner.graph_buckets)
    plans = num_wrappers * PLAN_BYTES
    text = f"{num_wrappers} wrappers (prompts, decodes, graphs) x {PLAN_BYTES} B"
    return [
        Item(f"{FLASHINFER}'s workspace", WORKSPACE_BYTES, "fixed"),
        Item(f"{FLASHINFER}'s plans", plans, text),
    ]


def _torchs(config: EngineConfig) -> list[Item]:
    return [_copied_context(config), _masks(config)]


def _copied_context(config: EngineConfig) -> Item:
    """Of one layer: of the requests that decode together, or of one with a piece of its prompt."""
    model, size = config.model, BYTES_PER_NUMBER[config.model.dtype]
    longest, requests = _longest(config), config.scheduler.max_num_seqs
    rows = min(requests * longest, max(MAX_GRAPH_KV_ROWS, longest))
    what = f"{rows} rows"
    latent = latent_attention(model)
    if latent is not None:
        copied, extra = rows * latent.row_size * size, 3 * LATENT_EXPANDED_BYTES
        text = f"{what} x {latent.row_size} x {size} B, and {extra} B of K and V made of them"
        return Item("copied context", copied + extra, text)
    copies = 2 if model.model_type in WITH_SINKS else 1
    heads = local_kv_heads(config)
    copied = rows * 2 * heads * model.head_dim * size * copies
    again = ", and again with sinks" if copies == 2 else ""
    text = f"{what} x 2 x {heads} KV heads x {model.head_dim} x {size} B{again} ({SDPA})"
    return Item("copied context", copied, text)


def _masks(config: EngineConfig) -> Item:
    """Of all pieces of prompts in a step, for each kind of layer, and those that are being made."""
    model, size = config.model, BYTES_PER_NUMBER[config.model.dtype]
    tokens, longest = config.scheduler.max_num_batched_tokens, _longest(config)
    kinds = 1 if layers_with_own_blocks(model) is None else 2
    num_bytes = tokens * longest * (kinds * size + MASK_BOOLS)
    text = f"{tokens} tokens x {longest} x ({kinds * size} + {MASK_BOOLS}) B"
    if model.model_type in WITH_SINKS:
        num_bytes += SINK_MASK_NUMBERS * size
        text += f", and {SINK_MASK_NUMBERS} x {size} B with sinks"
    return Item("masks", num_bytes, text)


def _longest(config: EngineConfig) -> int:
    """L in whole blocks."""
    longest = config.scheduler.max_model_len or config.model.max_position_embeddings
    block = config.cache.block_size
    return -(-longest // block) * block
