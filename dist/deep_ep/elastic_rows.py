"""Where rows stand that `ElasticBuffer` received: one for a token, or one for each of its experts.

K experts of a token, H hidden size, R ranks, L local experts, N tokens of a rank at most, M rows
received, X rows by expert.
"""

from dataclasses import dataclass

import torch

from moed.config.deep_ep_limits import elastic_expanded_rows
from moed.dist.deep_ep.elastic_handle import EPHandle
from moed.dist.deep_ep.events import garbage
from moed.dist.deep_ep.rules import require
from moed.dist.deep_ep.wire import Scrambler

FIRST_SLOT_COLUMN = 2
"""Of `recv_src_metadata`."""


@dataclass(frozen=True)
class Arrived:
    """Rows as they came, by source rank."""

    counts: list[int]
    """Of each rank."""
    sources: torch.Tensor
    """[M] int64 source rank."""
    tokens: torch.Tensor
    """[M] int64 token on the source rank."""
    local_ids: torch.Tensor
    """[M, K] int64, -1 where the choice lives elsewhere."""


@dataclass(frozen=True)
class Incoming:
    """What a dispatch brought."""

    arrived: Arrived
    values: list[torch.Tensor]
    """[M, H], and scales."""
    weights: torch.Tensor | None
    """[M, K] float32, of all choices."""


@dataclass(frozen=True)
class Placement:
    """Which arrived row stands where."""

    order: torch.Tensor
    """[M] int64: the arrived row at each place."""
    slots: torch.Tensor
    """[M, K] int64: place by expert of each choice of the row at a place, -1 for none."""
    num_per_expert: torch.Tensor
    """[L] int64."""
    starts: torch.Tensor
    """[L] int64: first place of each expert, aligned."""
    end: torch.Tensor
    """[] int64: where the next expert would start."""
    num_rows: int
    """Allocated for tokens."""
    num_expanded: int
    """Allocated by expert."""


@dataclass(frozen=True)
class Options:
    """How a dispatch was called."""

    num_max_tokens: int
    num_local_experts: int
    alignment: int
    is_deterministic: bool
    has_host_sync: bool


def place(arrived: Arrived, options: Options, scrambler: Scrambler) -> Placement:
    """Rows of one rank together, and of one expert; random inside, or sorted by source."""
    num_rows, top_k = arrived.local_ids.shape
    keys = arrived.sources
    if options.is_deterministic:
        keys = arrived.sources * options.num_max_tokens + arrived.tokens
    order = scrambler.order(keys)
    ids = arrived.local_ids[order]
    rows, choices = (ids >= 0).nonzero(as_tuple=True)
    experts = ids[rows, choices]
    num_per_expert = torch.bincount(experts, minlength=options.num_local_experts)
    aligned = (num_per_expert + options.alignment - 1) // options.alignment * options.alignment
    starts = aligned.cumsum(0) - aligned
    by_expert = scrambler.order(experts * num_rows + rows if options.is_deterministic else experts)
    before = (num_per_expert.cumsum(0) - num_per_expert)[experts[by_expert]]
    slots = torch.full((num_rows, top_k), -1)
    slots[rows[by_expert], choices[by_expert]] = (
        starts[experts[by_expert]] + torch.arange(len(rows)) - before
    )
    num_allocated, num_expanded = num_rows, int(aligned.sum())
    if not options.has_host_sync:
        num_ranks = len(arrived.counts)
        num_allocated = num_ranks * options.num_max_tokens
        num_expanded = elastic_expanded_rows(
            num_ranks, options.num_max_tokens, top_k, options.num_local_experts, options.alignment
        )
    end = aligned.sum()
    return Placement(order, slots, num_per_expert, starts, end, num_allocated, num_expanded)


def place_again(arrived: Arrived, handle: EPHandle) -> Placement:
    """The places of an earlier dispatch with the same routing, whose handle this is."""
    num_rows, num_tokens = len(arrived.sources), handle.num_max_tokens_per_rank
    origins = arrived.sources * num_tokens + arrived.tokens
    known = handle.recv_src_metadata[:num_rows]
    order = origins.argsort()[known[:, 0].argsort().argsort()]
    require(torch.equal(origins[order], known[:, 0].long()), "rows came that the handle lacks")
    nothing = torch.empty(0, dtype=torch.int64)
    return Placement(
        order,
        known[:, FIRST_SLOT_COLUMN:].long(),
        nothing,
        nothing,
        nothing,
        handle.num_recv_tokens,
        handle.num_expanded_tokens,
    )


def new_handle(
    arrived: Arrived,
    placement: Placement,
    options: Options,
    topk_idx: torch.Tensor,
    num_sms: int,
    *,
    do_expand: bool,
) -> EPHandle:
    """What the dispatch returns; `topk_idx` [T, K]."""
    num_ranks, num_local = len(arrived.counts), options.num_local_experts
    aligned = placement.starts.diff(append=placement.end[None])
    ends = placement.starts + (placement.num_per_expert if do_expand else aligned)
    return EPHandle(
        do_expand=do_expand,
        num_experts=num_local * num_ranks,
        expert_alignment=options.alignment,
        num_max_tokens_per_rank=options.num_max_tokens,
        num_sms=num_sms,
        topk_idx=topk_idx,
        num_recv_tokens=placement.num_rows,
        num_expanded_tokens=placement.num_expanded,
        num_recv_tokens_per_expert_list=aligned.tolist() if options.has_host_sync else [],
        psum_num_recv_tokens_per_scaleup_rank=torch.tensor(arrived.counts).cumsum(0).int(),
        psum_num_recv_tokens_per_expert=ends.int(),
        num_unaligned_recv_tokens_per_expert=(
            placement.num_per_expert.int() if do_expand else None
        ),
        recv_src_metadata=_metadata(arrived, placement, options.num_max_tokens, do_expand),
        dst_buffer_slot_idx=garbage(tuple(topk_idx.shape), torch.int32),
        token_metadata_at_forward=None,
        channel_linked_list=None,
    )


def _metadata(
    arrived: Arrived, placement: Placement, num_max_tokens: int, do_expand: bool
) -> torch.Tensor:
    """`recv_src_metadata` [rows, K + 2] int32."""
    num_rows, top_k = placement.slots.shape
    result = garbage((placement.num_rows, FIRST_SLOT_COLUMN + top_k), torch.int32)
    origins = arrived.sources * num_max_tokens + arrived.tokens
    result[:num_rows, 0] = origins[placement.order]
    if do_expand:
        result[:num_rows, FIRST_SLOT_COLUMN:] = placement.slots
    return result


@dataclass(frozen=True)
class Contents:
    """What the results of a dispatch will hold."""

    values: list[torch.Tensor]
    """[rows, H], and scales."""
    weights: torch.Tensor | None
    """[rows, K], or [rows] by expert."""
    local_ids: torch.Tensor | None
    """[rows, K], None by expert."""


def compact(incoming: Incoming, placement: Placement) -> Contents:
    """A row for each token, and garbage behind the last."""

    def ordered(part: torch.Tensor) -> torch.Tensor:
        result = garbage((placement.num_rows, part.shape[1]), part.dtype)
        result[: len(placement.order)] = part[placement.order]
        return result

    weights = incoming.weights
    return Contents(
        [ordered(part) for part in incoming.values],
        None if weights is None else ordered(weights),
        ordered(incoming.arrived.local_ids),
    )


def expanded(incoming: Incoming, placement: Placement) -> Contents:
    """A row for each choice, by expert, and garbage in the gaps."""
    rows, choices = (placement.slots >= 0).nonzero(as_tuple=True)
    places = placement.slots[rows, choices]
    sources = placement.order[rows]
    values = [garbage((placement.num_expanded, p.shape[1]), p.dtype) for p in incoming.values]
    for result, part in zip(values, incoming.values, strict=True):
        result[places] = part[sources]
    weights = None
    if incoming.weights is not None:
        weights = garbage((placement.num_expanded,), torch.float32)
        weights[places] = incoming.weights[sources, choices]
    return Contents(values, weights, None)


def gaps(handle: EPHandle) -> torch.Tensor:
    """[X] bool: places between the rows of an expert and the next one's start."""
    alignment, ends = handle.expert_alignment, handle.psum_num_recv_tokens_per_expert
    places = torch.arange(handle.num_expanded_tokens)[:, None]
    next_starts = (ends + alignment - 1) // alignment * alignment
    return ((places >= ends) & (places < next_starts)).any(dim=1)
