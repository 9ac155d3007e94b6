"""`ElasticBuffer` of the stand-in: DeepEP's class since version 2.

Signatures, defaults included, are DeepEP's own. Legend: T own tokens, N the most of them on a
rank, K experts of a token, H hidden size, R ranks, E experts, L = E / R, M rows received, X rows
by expert where expanded.
"""

import torch

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep.elastic_base import ElasticBase
from moed.dist.deep_ep.elastic_handle import EPHandle
from moed.dist.deep_ep.elastic_rows import (
    Contents,
    compact,
    expanded,
    gaps,
    new_handle,
    place,
    place_again,
)
from moed.dist.deep_ep.elastic_wire import returning_rows, send_home, send_tokens
from moed.dist.deep_ep.events import Delivery, EventHandle, EventOverlap, finish, garbage
from moed.dist.deep_ep.rules import Mode, Rules, Shape, check_tensor, require
from moed.dist.deep_ep.wire import Rows, joined

SCALES_ALIGNMENT = 4
"""Rows, of column-major scales."""


class ElasticBuffer(ElasticBase):
    """Keeps every limit of DeepEP, and is stricter, as `moed.dist.deep_ep.buffer.Buffer` is."""

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Rows, local ids [M, K], weights, handle, event.

        Compact: rows [M, H], weights [M, K] that are not zero for other ranks' choices. Expanded:
        rows [X, H] and weights [X] by expert, ids None. With `handle`: its routing again.
        """
        self._begin(previous_event, allocate_on_comm_stream)
        num_sms = self._num_sms(num_sms, num_qps, num_experts)
        request = self._request(
            self._check_rows(x),
            topk_idx,
            topk_weights,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            do_cpu_sync,
            do_expand,
            handle,
        )
        require(do_expand or not do_zero_padding, "do_zero_padding needs do_expand")
        stats = cumulative_local_expert_recv_stats
        self._check_stats(stats, request, handle)
        incoming = send_tokens(
            self._wire, request.values, request.topk_idx, topk_weights, request.shape
        )
        if handle is None:
            placement = place(incoming.arrived, request.options, self._scrambler)
            kept = request.topk_idx.clone() if do_handle_copy else request.topk_idx
            handle = new_handle(
                incoming.arrived, placement, request.options, kept, num_sms, do_expand=do_expand
            )
        else:
            placement = place_again(incoming.arrived, handle)
        if stats is not None:
            stats += placement.num_per_expert
        contents = (expanded if do_expand else compact)(incoming, placement)
        if do_zero_padding:
            contents.values[0][gaps(handle)] = 0
        return self._results(
            contents, handle, async_with_compute_stream, use_tma_aligned_col_major_sf
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """[T, H], the sums of rows `x` without weights; the weights [T, K] of own choices."""
        self._begin(previous_event, allocate_on_comm_stream)
        num_tokens, top_k = handle.topk_idx.shape
        self._num_sms(num_sms or handle.num_sms, num_qps, handle.num_experts)
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        self.rules.check_dtype(x.dtype, "x")
        check_tensor(x, "x", (num_rows, -1), x.dtype)
        if topk_weights is not None:
            expected = (num_rows,) if handle.do_expand else (num_rows, top_k)
            check_tensor(topk_weights, "topk_weights", expected, torch.float32)
            require(
                self.allow_multiple_reduction or not handle.do_expand,
                "topk_weights of an expanded combine need allow_multiple_reduction",
            )
        parts = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        for part in parts:
            check_tensor(part, "bias", (num_tokens, x.shape[1]), x.dtype)
        shape = Shape(handle.num_max_tokens_per_rank, handle.num_experts, x.shape[1], top_k)
        self._check_sizes(shape, x, num_tokens)
        reduces = self.allow_multiple_reduction or not handle.do_expand
        returning = returning_rows(x, handle, topk_weights, reduces=reduces)
        results = send_home(self._wire, returning, handle.topk_idx, shape, parts, reduces=reduces)
        combined = garbage((num_tokens, x.shape[1]), x.dtype)
        combined_weights = garbage((num_tokens, top_k), torch.float32)

        def fill() -> None:
            total, weights = results()
            combined.copy_(total)
            combined_weights.copy_(weights)

        event = finish(Delivery(fill), async_with_compute_stream)
        return combined, None if topk_weights is None else combined_weights, event

    def _results(
        self, contents: Contents, handle: EPHandle, is_asynchronous: bool, is_column_major: bool
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """New tensors, garbage until the event when asynchronous."""
        values = [garbage(tuple(part.shape), part.dtype) for part in contents.values]
        if is_column_major and len(values) > 1:
            values[1] = _column_major(values[1])
        pairs = list(zip(values, contents.values, strict=True))
        others = []
        for part in (contents.local_ids, contents.weights):
            others.append(None if part is None else garbage(tuple(part.shape), part.dtype))
            if part is not None and others[-1] is not None:
                pairs.append((others[-1], part))

        def fill() -> None:
            for result, part in pairs:
                result.copy_(part)

        event = finish(Delivery(fill), is_asynchronous)
        return joined(values), others[0], others[1], handle, event


class RelaxedElasticBuffer(ElasticBuffer):
    """`ElasticBuffer` for any hidden size and dtype of rows."""

    rules = Rules(Mode.RELAXED)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """Garbage of the shape and dtype of `scales` [rows, .], with rows next to each other."""
    num_rows, width = scales.shape
    num_aligned = limits.round_up(num_rows, SCALES_ALIGNMENT)
    return garbage((width, num_aligned), scales.dtype)[:, :num_rows].T
