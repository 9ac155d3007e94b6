"""Attention over the paged cache with plain torch: one code for CPU and CUDA.

Legend: T tokens, R requests, r decoding requests, n tokens of one request, c its context,
H query heads, G KV heads, d head dim, P blocks, S = P x block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moed.config.attention import SINK_MASK_NUMBERS
from moed.config.graphs import MAX_GRAPH_KV_ROWS
from moed.config.windows import Window
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
    """Requests with one token, padded to the longest of them."""

    rows: torch.Tensor | None
    """[r] int64, None when the step holds nothing else."""
    blocks: torch.Tensor
    """[r x P] int64."""
    mask: torch.Tensor
    """[r, 1, 1, S], added to the scores."""


class StepAttention(Protocol):
    """What all layers of one step share that see equally far back."""

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        kv_cache: KVCache,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H, d] for `query` [T, H, d]; K and V of this step's tokens are already in the cache.
        `sinks` [H] are scores of a key more, whose value is 0.
        """
        ...


class GraphAttention(Protocol):
    """Of a step that is recorded as a graph, in memory that is written before each replay."""

    plans: tuple[StepAttention, StepAttention]
    """Of layers that see the whole context, and of those that slide."""

    def prepare(self, block_tables: torch.Tensor, contexts: Sequence[int]) -> None:
        """For rows with `contexts` [R] tokens and tables [R, P], on the device. Not in a graph."""
        ...


class AttentionBackend(Protocol):
    """What a decoder's attention runs on."""

    copies_context: bool
    """Each layer copies the contexts of a step, so that their sum counts."""

    def plan(
        self, batch: ForwardBatch, block_size: int, window: Window | None, dtype: torch.dtype
    ) -> StepAttention:
        """`window`: what a token sees; None: all before it."""
        ...

    def graph(
        self,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[Window | None, Window | None],
    ) -> GraphAttention | None:
        """Of a graph for so many requests of so many blocks each; None: `plan` is recorded too."""
        ...


@dataclass(frozen=True)
class AttentionPlan:
    """A `StepAttention` with plain torch."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decodes, ...]

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        kv_cache: KVCache,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `StepAttention`."""
        return paged_attention(query, layer, kv_cache, self, scale, sinks)


class TorchAttention:
    """An `AttentionBackend` for every model and device."""

    copies_context = True

    def plan(
        self, batch: ForwardBatch, block_size: int, window: Window | None, dtype: torch.dtype
    ) -> AttentionPlan:
        """See `AttentionBackend`."""
        return plan_attention(batch, block_size, window, dtype)

    def graph(
        self,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[Window | None, Window | None],
    ) -> None:
        """See `AttentionBackend`: masks follow from positions, on the device."""
        return None


def plan_attention(
    batch: ForwardBatch, block_size: int, window: Window | None, dtype: torch.dtype
) -> AttentionPlan:
    """`window`: what a token sees; None: all before it. Blocks before the first window of a request
    are not read.
    """
    prefills, requests, decode_rows = _plan_pieces(batch, block_size, window, dtype)
    widths = [-(-batch.context_lens[request] // block_size) for request in requests]
    groups = decode_groups(widths, max(1, MAX_GRAPH_KV_ROWS // block_size))
    if len(groups) == 1 and len(requests) == len(batch.query_lens):
        tables = batch.block_tables[:, : max(widths)]
        whole = _decodes(None, tables, batch.positions, block_size, window, dtype)
        return AttentionPlan((), (whole,))
    made = []
    for group in groups:
        rows = [decode_rows[at] for at in group]
        rows_of_group = torch.tensor(rows, device=batch.positions.device)
        width = max(widths[at] for at in group)
        tables = batch.block_tables[[requests[at] for at in group], :width]
        positions = batch.positions[rows_of_group]
        made.append(_decodes(rows_of_group, tables, positions, block_size, window, dtype))
    return AttentionPlan(prefills, tuple(made))


def _plan_pieces(
    batch: ForwardBatch, block_size: int, window: Window | None, dtype: torch.dtype
) -> tuple[tuple[Prefill, ...], list[int], list[int]]:
    """The requests with several tokens; the numbers of those with one, and of their rows."""
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
            first = 0
            if window is not None:
                first = max(0, window.first_seen(context - num_tokens)) // block_size
            blocks = batch.block_tables[request, first : -(-context // block_size)]
            rows = slice(row, row + num_tokens)
            is_plain = num_tokens == context and (window is None or context <= window.size)
            shift = first * block_size
            context -= shift
            mask = None
            if not is_plain:
                mask = _mask(batch.positions[rows, None], shift, context, window, dtype)
            prefills.append(Prefill(rows, blocks, context, mask))
        row += num_tokens
    return tuple(prefills), decodes, decode_rows


def decode_groups(widths: Sequence[int], most: int) -> list[list[int]]:
    """Requests of `widths` blocks, in groups of at most `most` blocks once all are padded to the
    widest of their group; one that is wider goes alone. One group, if it can be.
    """
    if not widths:
        return []
    if len(widths) * max(widths) <= most:
        return [list(range(len(widths)))]
    groups: list[list[int]] = []
    # Those of like width together, or one long request would make all others as long.
    for request in sorted(range(len(widths)), key=lambda at: -widths[at]):
        if groups and (len(groups[-1]) + 1) * widths[groups[-1][0]] <= most:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _decodes(
    rows: torch.Tensor | None,
    tables: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    window: Window | None,
    dtype: torch.dtype,
) -> Decodes:
    """Of requests with `tables` [r, P] and `positions` [r]."""
    begins = torch.zeros_like(positions)
    if window is not None:
        tables, begins = _last_blocks(tables, positions, block_size, window)
    positions, begins = (each[:, None, None, None] for each in (positions, begins))
    mask = _mask(positions, begins, tables.shape[1] * block_size, window, dtype)
    return Decodes(rows, tables.flatten(), mask)


def _last_blocks(
    tables: torch.Tensor, positions: torch.Tensor, block_size: int, window: Window
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `tables` [r, P], the blocks that the windows of `positions` [r] touch, and the position
    [r] at which the first of them begins. Reads nothing on the host.
    """
    num_blocks = tables.shape[1]
    num_seen = min(num_blocks, -(-(window.size - 1) // block_size) + 1)
    first = window.first_seen(positions).clamp(min=0) // block_size
    columns = first[:, None] + torch.arange(num_seen, device=tables.device)
    # Beyond the last block it comes again, at places that no query sees.
    columns.clamp_(max=num_blocks - 1)
    return tables.gather(1, columns), first * block_size


def _mask(
    positions: torch.Tensor,
    shift: int | torch.Tensor,
    length: int,
    window: Window | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[..., length]: 0 where the query at `positions` [..., 1] sees the key, else -inf; the first
    key is at position `shift`.
    """
    keys = torch.arange(length, device=positions.device) + shift
    is_hidden = keys > positions
    if window is not None:
        is_hidden |= keys < window.first_seen(positions)
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill_(is_hidden, -torch.inf)


def paged_attention(
    query: torch.Tensor,
    layer: int,
    kv_cache: KVCache,
    plan: AttentionPlan,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `StepAttention.attend`.

    Decodes go together and the others one by one. A request's result does not depend on the others.
    """
    if plan.decodes and plan.decodes[0].rows is None:
        return _decode(query, layer, kv_cache, plan.decodes[0], scale, sinks)
    output = torch.empty_like(query)
    for prefill in plan.prefills:
        output[prefill.rows] = _prefill(query[prefill.rows], layer, kv_cache, prefill, scale, sinks)
    for decodes in plan.decodes:
        output[decodes.rows] = _decode(query[decodes.rows], layer, kv_cache, decodes, scale, sinks)
    return output


def _prefill(
    query: torch.Tensor,
    layer: int,
    kv_cache: KVCache,
    prefill: Prefill,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, H, d]."""
    keys, values = kv_cache.read(layer, prefill.blocks)
    if sinks is not None:
        keys, values = keys[: prefill.context], values[: prefill.context]
        return _prefill_with_sinks(query, keys, values, prefill, scale, sinks)
    # A KV head and its query heads are one of a batch: kernels that never hold all scores take
    # masks so, and not with fewer KV heads than query heads.
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    shape = (num_kv_heads, num_heads // num_kv_heads, prefill.context, head_dim)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).reshape(*shape[:2], num_tokens, head_dim),
        keys[: prefill.context].transpose(0, 1)[:, None].expand(shape),
        values[: prefill.context].transpose(0, 1)[:, None].expand(shape),
        attn_mask=None if prefill.mask is None else prefill.mask.expand(*shape[:2], -1, -1),
        is_causal=prefill.mask is None,
        scale=scale,
    )
    return attended.reshape(num_heads, num_tokens, head_dim).transpose(0, 1)


def _prefill_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefill: Prefill,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """[n, H, d]. The sink is a key of zeros, whose score the mask holds; by KV head, since masks
    with sinks differ between heads and would be large together; for long contexts also in parts of
    the rows.
    """
    num_tokens, num_kv_heads, mask = query.shape[0], keys.shape[1], prefill.mask
    if mask is None:
        positions = torch.arange(num_tokens, device=query.device)[:, None]
        mask = _mask(positions, 0, prefill.context, None, query.dtype)
    keys, values = _with_sink_row(keys, 0), _with_sink_row(values, 0)
    size = query.shape[1] // num_kv_heads
    output = torch.empty_like(query)
    num_rows = max(1, SINK_MASK_NUMBERS // (size * len(keys)))
    for first in range(0, num_tokens, num_rows):
        rows = slice(first, first + num_rows)
        own_mask = mask[rows].expand(size, -1, -1)
        for head, own_sinks in enumerate(sinks.view(-1, size)):
            heads = slice(head * size, (head + 1) * size)
            scores = own_sinks.to(mask.dtype)[:, None, None].expand(*own_mask.shape[:2], 1)
            attended = F.scaled_dot_product_attention(
                query[rows, heads].transpose(0, 1)[None],
                keys[None, None, :, head].expand(1, size, -1, -1),
                values[None, None, :, head].expand(1, size, -1, -1),
                attn_mask=torch.cat([own_mask, scores], dim=-1)[None],
                scale=scale,
            )
            output[rows, heads] = attended[0].transpose(0, 1)
    return output


def _with_sink_row(states: torch.Tensor, dim: int) -> torch.Tensor:
    """`states` with zeros for one key more, along `dim`."""
    shape = list(states.shape)
    shape[dim] = 1
    return torch.cat([states, states.new_zeros(shape)], dim=dim)


def _decode(
    query: torch.Tensor,
    layer: int,
    kv_cache: KVCache,
    decodes: Decodes,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[r, H, d]."""
    num_requests, num_heads, head_dim = query.shape
    keys, values = kv_cache.read(layer, decodes.blocks)
    num_kv_heads = keys.shape[1]
    shape = (num_requests, -1, num_kv_heads, head_dim)
    keys, values, mask = keys.view(shape), values.view(shape), decodes.mask
    if sinks is not None:
        keys, values = _with_sink_row(keys, 1), _with_sink_row(values, 1)
        scores = sinks.to(mask.dtype).view(1, num_kv_heads, -1, 1)
        wide = (num_requests, *scores.shape[1:3], -1)
        mask = torch.cat([mask.expand(wide), scores.expand(wide)], dim=-1)
    # The query heads of one KV head take the place of the query's tokens.
    attended = F.scaled_dot_product_attention(
        query.view(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return attended.reshape(query.shape)
