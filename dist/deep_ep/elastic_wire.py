"""Dispatch and combine of `ElasticBuffer` over `torch.distributed`: two collectives each.

A row travels once to each rank that holds one of its experts, and one sum comes back, or, without
multiple reductions, one row for each expert. No weights are applied. T own tokens, K experts of a
token, H hidden size, R ranks, M rows received.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moed.dist.deep_ep.elastic_handle import EPHandle
from moed.dist.deep_ep.elastic_rows import FIRST_SLOT_COLUMN, Arrived, Incoming
from moed.dist.deep_ep.events import garbage
from moed.dist.deep_ep.high_throughput import dispatch_layout, sum_by_token
from moed.dist.deep_ep.low_latency import weighted_sum
from moed.dist.deep_ep.rules import Shape, require
from moed.dist.deep_ep.wire import Call, RowFormat, Wire


def send_tokens(
    wire: Wire,
    values: list[torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    shape: Shape,
) -> Incoming:
    """`values`: [T, H], and scales [T, .]. Collective."""
    layout = dispatch_layout(topk_idx, shape.num_experts, wire.num_ranks)
    _, tokens = layout.is_token_in_rank.T.nonzero(as_tuple=True)
    tensors = [tokens[:, None], topk_idx[tokens], *(part[tokens] for part in values)]
    parts = [
        (torch.int32, 1),
        (torch.int64, shape.top_k),
        *((part.dtype, part.shape[1]) for part in values),
    ]
    if topk_weights is not None:
        tensors.append(topk_weights[tokens])
        parts.append((torch.float32, shape.top_k))
    row_format = RowFormat(tuple(parts))
    rows = row_format.pack(*tensors)
    send_counts: list[int] = layout.num_tokens_per_rank.tolist()
    counts = wire.announce(Call.DISPATCH, shape, rows.shape[1], send_counts)
    arrived = row_format.unpack(wire.exchange(rows, send_counts, counts))
    num_local = shape.num_experts // wire.num_ranks
    ids = arrived[1]
    is_here = (ids >= 0) & (ids // num_local == wire.rank)
    return Incoming(
        Arrived(
            counts,
            wire.sources(counts),
            arrived[0][:, 0].long(),
            torch.where(is_here, ids % num_local, -1),
        ),
        arrived[2 : 2 + len(values)],
        arrived[-1] if topk_weights is not None else None,
    )


@dataclass(frozen=True)
class Returning:
    """Rows to send home, by source rank."""

    counts: list[int]
    tokens: torch.Tensor
    """[n] int64."""
    choices: torch.Tensor
    """[n] int64: which of K; 0 for a sum over several."""
    values: torch.Tensor
    """[n, H]."""
    weights: torch.Tensor
    """[n, K] float32, or [n, 0]."""


def returning_rows(
    x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None, *, reduces: bool
) -> Returning:
    """What goes home of `x` [M, H], or of [X, H] where expanded. `reduces`: sum a token's local
    experts first.
    """
    prefix = handle.psum_num_recv_tokens_per_scaleup_rank
    counts = prefix.diff(prepend=prefix.new_zeros(1))
    num_rows = int(counts.sum())
    origins = handle.recv_src_metadata[:num_rows, 0].long()
    tokens = origins % handle.num_max_tokens_per_rank
    weights = torch.empty(num_rows, 0)
    if not handle.do_expand:
        if topk_weights is not None:
            weights = topk_weights[:num_rows]
        return Returning(counts.tolist(), tokens, torch.zeros_like(tokens), x[:num_rows], weights)
    slots = handle.recv_src_metadata[:num_rows, FIRST_SLOT_COLUMN:].long()
    rows, choices = (slots >= 0).nonzero(as_tuple=True)
    if not reduces:
        ranks = torch.arange(len(counts)).repeat_interleave(counts)[rows]
        per_rank: list[int] = torch.bincount(ranks, minlength=len(counts)).tolist()
        return Returning(per_rank, tokens[rows], choices, x[slots[rows, choices]], weights[rows])
    if topk_weights is not None:
        weights = torch.zeros(slots.shape)
        weights[rows, choices] = topk_weights[slots[rows, choices]]
    spread = garbage((*slots.shape, x.shape[1]), x.dtype)
    spread[rows, choices] = x[slots[rows, choices]]
    sums = weighted_sum(spread, slots, torch.ones(slots.shape)).to(x.dtype)
    return Returning(counts.tolist(), tokens, torch.zeros_like(tokens), sums, weights)


def send_home(
    wire: Wire,
    returning: Returning,
    topk_idx: torch.Tensor,
    shape: Shape,
    bias: list[torch.Tensor],
    *,
    reduces: bool,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Collective. Afterwards the result makes [T, H] float32 and weights [T, K] float32."""
    num_tokens, top_k = topk_idx.shape
    num_local = shape.num_experts // wire.num_ranks
    parts = [(torch.int32, 2), (returning.values.dtype, shape.hidden_size)]
    tensors = [torch.stack([returning.tokens, returning.choices], dim=1), returning.values]
    has_weights = returning.weights.shape[1] > 0
    if has_weights:
        parts.append((torch.float32, top_k))
        tensors.append(returning.weights)
    row_format = RowFormat(tuple(parts))
    rows = row_format.pack(*tensors)
    counts = wire.announce(Call.COMBINE, shape, rows.shape[1], returning.counts)
    if reduces:
        expected = dispatch_layout(topk_idx, shape.num_experts, wire.num_ranks)
        require(
            counts == expected.num_tokens_per_rank.tolist(),
            "combine with the handle of another dispatch",
        )
    arrived = row_format.unpack(wire.exchange(rows, returning.counts, counts))

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        tokens, choices = arrived[0].long().unbind(dim=1)
        if reduces:
            total = sum_by_token(arrived[1], tokens, counts, num_tokens, bias)
        else:
            spread = garbage((num_tokens, top_k, shape.hidden_size), arrived[1].dtype)
            spread[tokens, choices] = arrived[1]
            total = weighted_sum(spread, topk_idx, torch.ones(topk_idx.shape))
            for addend in bias:
                total += addend
        weights = torch.zeros(num_tokens, top_k)
        if has_weights:
            is_there = topk_idx[tokens] // num_local == wire.sources(counts)[:, None]
            rows_there, choices_there = is_there.nonzero(as_tuple=True)
            weights[tokens[rows_there], choices_there] = arrived[2][rows_there, choices_there]
        return total, weights

    return results
