"""High-throughput dispatch and combine over `torch.distributed`: two collectives each.

A row travels once to each rank that holds one of its experts. Combine sums what comes back and
applies no weights. T own tokens, K experts of a token, H hidden size, R ranks, E experts, M rows
received: those of rank 0 first, then of rank 1 and so on, in random order within a rank.
"""

from dataclasses import dataclass

import torch

from moed.config.deep_ep_limits import GPUS_PER_NODE, round_up
from moed.dist.deep_ep.events import Delivery, EventOverlap, finish, garbage
from moed.dist.deep_ep.rules import Shape, require
from moed.dist.deep_ep.wire import Call, RowFormat, Scrambler, Wire

Handle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""rank_prefix_matrix [R, R] int32 of which this rank's column is known, two tensors without
meaning, recv_src_idx [M] int32, is_token_in_rank [T, R], one more without meaning.
"""
# The sum of rows is the same call with other sizes on the wire.
NO_EXPERTS = 0


@dataclass(frozen=True)
class Layout:
    """Where tokens go."""

    num_tokens_per_rank: torch.Tensor
    """[R] int32."""
    num_tokens_per_rdma_rank: torch.Tensor | None
    """[R / 8] int32, None on one node."""
    num_tokens_per_expert: torch.Tensor
    """[E] int32."""
    is_token_in_rank: torch.Tensor
    """[T, R] bool."""


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Of ids [T, K]; -1 goes nowhere."""
    num_local = num_experts // num_ranks
    ranks = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
    is_in_rank = (ranks[:, :, None] == torch.arange(num_ranks)).any(dim=1)
    per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    per_node = None
    if num_ranks > GPUS_PER_NODE:
        nodes = is_in_rank.view(-1, num_ranks // GPUS_PER_NODE, GPUS_PER_NODE).any(dim=2)
        per_node = nodes.sum(dim=0, dtype=torch.int32)
    return Layout(is_in_rank.sum(dim=0, dtype=torch.int32), per_node, per_expert.int(), is_in_rank)


@dataclass(frozen=True)
class Received:
    """The results of a dispatch."""

    values: list[torch.Tensor]
    """[M, H], and scales."""
    topk_idx: torch.Tensor
    """[M, K] int64, local; -1 where the choice lives elsewhere."""
    topk_weights: torch.Tensor
    """[M, K] float32, 0 where the choice lives elsewhere."""
    num_tokens_per_expert: list[int]
    handle: Handle
    event: EventOverlap


class HighThroughput:
    """The high-throughput half of a buffer. Arguments were checked by `Buffer`."""

    def __init__(self, wire: Wire, scrambler: Scrambler) -> None:
        self._wire = wire
        self._scrambler = scrambler

    def dispatch(
        self,
        values: list[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        layout: Layout,
        *,
        expert_alignment: int,
        num_worst_tokens: int,
        is_asynchronous: bool,
    ) -> Received:
        """`values`: [T, H], and scales [T, .]. `num_worst_tokens`: rows of the result, 0 for as
        many as come.
        """
        num_local = layout.num_tokens_per_expert.shape[0] // self._wire.num_ranks
        top_k = topk_idx.shape[1]
        ranks, tokens = layout.is_token_in_rank.T.nonzero(as_tuple=True)
        is_there = (topk_idx[tokens] >= 0) & (topk_idx[tokens] // num_local == ranks[:, None])
        ids = torch.where(is_there, topk_idx[tokens] % num_local, -1)
        weights = torch.where(is_there, topk_weights[tokens], 0.0)
        row_format = RowFormat(
            (
                (torch.int32, 1),
                (torch.int64, top_k),
                (torch.float32, top_k),
                *((part.dtype, part.shape[1]) for part in values),
            )
        )
        rows = row_format.pack(tokens[:, None], ids, weights, *(part[tokens] for part in values))
        shape = Shape(0, num_local * self._wire.num_ranks, values[0].shape[1], top_k)
        incoming, counts = self._send(rows, layout.num_tokens_per_rank.tolist(), shape)
        num_rows = num_worst_tokens or sum(counts)
        require(sum(counts) <= num_rows, f"{sum(counts)} rows came, for {num_worst_tokens}")

        arrived, *parts = row_format.unpack(incoming)
        order = self._scrambler.order(self._wire.sources(counts))
        arrived_ids = parts[0]
        outputs = [garbage((num_rows, part.shape[1]), part.dtype) for part in parts]
        recv_src_idx = garbage((num_rows,), torch.int32)
        recv_src_idx[: len(order)] = arrived[order, 0]
        if num_worst_tokens:
            outputs[0].fill_(-1)

        def fill() -> None:
            for output, part in zip(outputs, parts, strict=True):
                output[: len(order)] = part[order]

        per_expert: list[int] = []
        if not num_worst_tokens:
            found = torch.bincount(arrived_ids[arrived_ids >= 0], minlength=num_local).tolist()
            per_expert = [round_up(count, expert_alignment) for count in found]
        event = finish(Delivery(fill), is_asynchronous)
        handle = self._handle(counts, recv_src_idx, layout.is_token_in_rank)
        return Received(outputs[2:], outputs[0], outputs[1], per_expert, handle, event)

    def dispatch_again(
        self, values: list[torch.Tensor], handle: Handle, *, is_asynchronous: bool
    ) -> tuple[list[torch.Tensor], EventOverlap]:
        """Other rows [T, .] on the ways of an earlier dispatch, to the same places."""
        prefix, _, _, recv_src_idx, is_token_in_rank, _ = handle
        _, tokens = is_token_in_rank.T.nonzero(as_tuple=True)
        row_format = RowFormat(
            ((torch.int32, 1), *((part.dtype, part.shape[1]) for part in values))
        )
        rows = row_format.pack(tokens[:, None], *(part[tokens] for part in values))
        shape = Shape(0, NO_EXPERTS, values[0].shape[1], 0)
        incoming, counts = self._send(rows, is_token_in_rank.sum(dim=0).tolist(), shape)
        require(
            counts == self._counts(prefix),
            "rows came that the dispatch of this handle did not send",
        )
        arrived, *parts = row_format.unpack(incoming)
        sources = self._wire.sources(counts)
        # Rank and token name a row, here and in the handle.
        places = (sources << 32) + recv_src_idx[: len(sources)]
        order = ((sources << 32) + arrived[:, 0]).argsort()[places.argsort().argsort()]
        num_rows = recv_src_idx.shape[0]
        outputs = [garbage((num_rows, part.shape[1]), part.dtype) for part in parts]

        def fill() -> None:
            for output, part in zip(outputs, parts, strict=True):
                output[: len(order)] = part[order]

        return outputs, finish(Delivery(fill), is_asynchronous)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        bias: list[torch.Tensor],
        *,
        is_asynchronous: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """`x` [M, H]; returns [T, H] sums over ranks in float32, weights [T, K] likewise."""
        prefix, _, _, recv_src_idx, is_token_in_rank, _ = handle
        counts = self._counts(prefix)
        num_rows, num_tokens = sum(counts), is_token_in_rank.shape[0]
        top_k = 0 if topk_weights is None else topk_weights.shape[1]
        parts = [(torch.int32, 1), (x.dtype, x.shape[1])]
        tensors = [recv_src_idx[:num_rows, None], x[:num_rows]]
        if topk_weights is not None:
            parts.append((torch.float32, top_k))
            tensors.append(topk_weights[:num_rows])
        row_format = RowFormat(tuple(parts))
        rows = row_format.pack(*tensors)
        shape = Shape(0, NO_EXPERTS, x.shape[1], top_k)
        expected = is_token_in_rank.sum(dim=0).tolist()
        receive_counts = self._wire.announce(Call.COMBINE, shape, rows.shape[1], counts)
        require(receive_counts == expected, "combine with the handle of another dispatch")
        arrived = row_format.unpack(self._wire.exchange(rows, counts, receive_counts))
        combined = garbage((num_tokens, x.shape[1]), x.dtype)
        combined_weights = None
        if topk_weights is not None:
            combined_weights = garbage((num_tokens, top_k), torch.float32)

        def fill() -> None:
            tokens = arrived[0][:, 0].long()
            combined.copy_(sum_by_token(arrived[1], tokens, receive_counts, num_tokens, bias))
            if combined_weights is not None:
                combined_weights.copy_(
                    sum_by_token(arrived[2], tokens, receive_counts, num_tokens, [])
                )

        return combined, combined_weights, finish(Delivery(fill), is_asynchronous)

    def _send(
        self, rows: torch.Tensor, send_counts: list[int], shape: Shape
    ) -> tuple[torch.Tensor, list[int]]:
        counts = self._wire.announce(Call.DISPATCH, shape, rows.shape[1], send_counts)
        return self._wire.exchange(rows, send_counts, counts), counts

    def _handle(
        self, counts: list[int], recv_src_idx: torch.Tensor, is_token_in_rank: torch.Tensor
    ) -> Handle:
        num_ranks = self._wire.num_ranks
        prefix = garbage((num_ranks, num_ranks), torch.int32)
        prefix[:, self._wire.rank] = torch.tensor(counts).cumsum(0)
        unknown = garbage((num_ranks, 1), torch.int32)
        send_head = garbage((is_token_in_rank.shape[0], num_ranks), torch.int32)
        return prefix, unknown, unknown, recv_src_idx, is_token_in_rank, send_head

    def _counts(self, prefix: torch.Tensor) -> list[int]:
        """Rows received from each rank."""
        own = prefix[:, self._wire.rank]
        counts: list[int] = own.diff(prepend=own.new_zeros(1)).tolist()
        return counts


def sum_by_token(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: list[int],
    num_tokens: int,
    bias: list[torch.Tensor],
) -> torch.Tensor:
    """[num_tokens, width] float32: `rows` [n, width] added to their `tokens` [n], rank by rank,
    and `bias` first. Each rank sends a token once at most.
    """
    total = torch.zeros(num_tokens, rows.shape[1])
    for addend in bias:
        total += addend
    start = 0
    for count in counts:
        part = slice(start, start + count)
        total[tokens[part]] += rows[part]
        start += count
    return total
