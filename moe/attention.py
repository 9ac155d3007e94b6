"""Attention over the paged cache with plain torch: one code for CPU and CUDA.

Legend: T tokens, R requests, r decoding requests, n tokens of one request, c its context,
H query heads, G KV heads, d head dim, P blocks, S = P x block size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache


@dataclass(frozen=True)
class Prefill:
    """Several tokens of one request, which attend with a causal mask of their own."""

    rows: slice
    blocks: torch.Tensor
    """[P] int64."""
    context: int
    mask: torch.Tensor | None
    """[n, c], added to the scores. None: the request's whole context, plainly causal."""


@dataclass(frozen=True)
class Decodes:
    """All requests with one token, padded to the longest of them."""

    rows: torch.Tensor | None
    """[r] int64, None when the step holds nothing else."""
    blocks: torch.Tensor
    """[r x P] int64."""
    mask: torch.Tensor
    """[r, 1, 1, S], added to the scores."""


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one step share."""

    prefills: tuple[Prefill, ...]
    decodes: Decodes | None


def plan_attention(
    batch: ForwardBatch, block_size: int, window: int | None, dtype: torch.dtype
) -> AttentionPlan:
    """`window`: a token sees itself and the `window` - 1 before it; None: all before it."""
    prefills: list[Prefill] = []
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
            blocks = batch.block_tables[request, : -(-context // block_size)]
            rows = slice(row, row + num_tokens)
            positions = batch.positions[rows, None]
            is_plain = num_tokens == context and (window is None or context <= window)
            mask = None if is_plain else _mask(positions, context, window, dtype)
            prefills.append(Prefill(rows, blocks, context, mask))
        row += num_tokens
    if not decodes:
        return AttentionPlan(tuple(prefills), None)
    num_blocks = -(-max(batch.context_lens[request] for request in decodes) // block_size)
    tables, positions, rows_of_decodes = batch.block_tables, batch.positions, None
    if prefills or len(decodes) < len(batch.query_lens):
        rows_of_decodes = torch.tensor(decode_rows, device=positions.device)
        tables, positions = tables[decodes], positions[rows_of_decodes]
    mask = _mask(positions[:, None, None, None], num_blocks * block_size, window, dtype)
    blocks = tables[:, :num_blocks].flatten()
    return AttentionPlan(tuple(prefills), Decodes(rows_of_decodes, blocks, mask))


def _mask(
    positions: torch.Tensor, length: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[..., length]: 0 where the query at `positions` [..., 1] sees the key, else -inf."""
    keys = torch.arange(length, device=positions.device)
    is_hidden = keys > positions
    if window is not None:
        is_hidden |= keys <= positions - window
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill_(is_hidden, -torch.inf)


def paged_attention(
    query: torch.Tensor, layer: int, kv_cache: KVCache, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """[T, H, d] for `query` [T, H, d]; K and V of this step's tokens are already in the cache.

    Decodes go together and the others one by one. A request's result does not depend on the others.
    """
    decodes = plan.decodes
    if decodes is not None and decodes.rows is None:
        return _decode(query, layer, kv_cache, decodes, scale)
    output = torch.empty_like(query)
    for prefill in plan.prefills:
        output[prefill.rows] = _prefill(query[prefill.rows], layer, kv_cache, prefill, scale)
    if decodes is not None:
        output[decodes.rows] = _decode(query[decodes.rows], layer, kv_cache, decodes, scale)
    return output


def _prefill(
    query: torch.Tensor, layer: int, kv_cache: KVCache, prefill: Prefill, scale: float
) -> torch.Tensor:
    """[n, H, d]."""
    keys, values = kv_cache.read(layer, prefill.blocks)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[: prefill.context].transpose(0, 1)[None],
        values[: prefill.context].transpose(0, 1)[None],
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _decode(
    query: torch.Tensor, layer: int, kv_cache: KVCache, decodes: Decodes, scale: float
) -> torch.Tensor:
    """[r, H, d]."""
    num_requests, num_heads, head_dim = query.shape
    keys, values = kv_cache.read(layer, decodes.blocks)
    num_kv_heads = keys.shape[1]
    shape = (num_requests, -1, num_kv_heads, head_dim)
    # The query heads of one KV head take the place of the query's tokens.
    attended = F.scaled_dot_product_attention(
        query.view(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim),
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        attn_mask=decodes.mask,
        scale=scale,
    )
    return attended.reshape(query.shape)
