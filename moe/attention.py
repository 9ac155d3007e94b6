"""Attention over the paged cache with plain torch: one code for CPU and CUDA.

Legend: T tokens, R requests, H query heads, G KV heads, d head dim, S longest context.
"""

import torch
import torch.nn.functional as F

from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache


def paged_attention(
    query: torch.Tensor, layer: int, kv_cache: KVCache, batch: ForwardBatch, scale: float
) -> torch.Tensor:
    """[T, H, d] for `query` [T, H, d]; K and V of this step's tokens are already in the cache.

    Requests with one token (decodes) go together, padded to the longest of them; the others go one
    by one, each with its own causal mask. A request's result does not depend on the others.
    """
    output = torch.empty_like(query)
    decodes: list[int] = []
    decode_rows: list[int] = []
    row = 0
    for request, (num_tokens, context) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        if num_tokens == 1:
            decodes.append(request)
            decode_rows.append(row)
        elif num_tokens:
            rows = slice(row, row + num_tokens)
            output[rows] = _prefill(query[rows], layer, kv_cache, batch, request, context, scale)
        row += num_tokens
    if decodes:
        output[decode_rows] = _decode(query[decode_rows], layer, kv_cache, batch, decodes, scale)
    return output


def _prefill(
    query: torch.Tensor,
    layer: int,
    kv_cache: KVCache,
    batch: ForwardBatch,
    request: int,
    context: int,
    scale: float,
) -> torch.Tensor:
    """[n, H, d] for the last n tokens of one request's `context`."""
    num_blocks = -(-context // kv_cache.block_size)
    blocks = batch.block_tables[request, :num_blocks]
    keys = kv_cache.keys[layer][blocks].flatten(0, 1)[:context]
    values = kv_cache.values[layer][blocks].flatten(0, 1)[:context]
    num_tokens = query.shape[0]
    is_whole = num_tokens == context
    mask = None
    if not is_whole:
        positions = torch.arange(context - num_tokens, context, device=query.device)
        mask = torch.arange(context, device=query.device) <= positions[:, None]
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _decode(
    query: torch.Tensor,
    layer: int,
    kv_cache: KVCache,
    batch: ForwardBatch,
    requests: list[int],
    scale: float,
) -> torch.Tensor:
    """[r, H, d] for one token of each of `requests`."""
    contexts = torch.tensor(
        [batch.context_lens[request] for request in requests], device=query.device
    )
    longest = max(batch.context_lens[request] for request in requests)
    num_blocks = -(-longest // kv_cache.block_size)
    blocks = batch.block_tables[requests, :num_blocks]
    keys = kv_cache.keys[layer][blocks].flatten(1, 2)
    values = kv_cache.values[layer][blocks].flatten(1, 2)
    is_seen = torch.arange(keys.shape[1], device=query.device) < contexts[:, None]
    num_kv_heads = keys.shape[2]
    grouped = query.view(query.shape[0], num_kv_heads, -1, query.shape[-1])
    attended = F.scaled_dot_product_attention(
        grouped,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=is_seen[:, None, None],
        scale=scale,
    )
    return attended.reshape(query.shape)
