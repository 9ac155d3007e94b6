"""Low-latency dispatch and combine over `torch.distributed`: two collectives each.

A row travels once for each expert that its token chose. Weights are applied in combine.
T own tokens, K experts of a token, H hidden size, L local experts, C = R x N, n rows in a call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moed.config.deep_ep_limits import ALIGNMENT_CHANNELS
from moed.dist.deep_ep.batched import Received, Transport, rows_by_source
from moed.dist.deep_ep.events import Delivery, EventOverlap, fill_with_garbage, finish, garbage
from moed.dist.deep_ep.order import LowLatencyOrder, Result, Sizes, Watch
from moed.dist.deep_ep.rules import Shape, require
from moed.dist.deep_ep.wire import Call, RowFormat, Scrambler, Wire

Hook = Callable[[], None]
Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""src_info [L, C], layout_range [L, R], N, H, E."""


@dataclass
class _Dispatch:
    """What the stand-in remembers of a dispatch, to check its combine."""

    number: int
    topk_idx: torch.Tensor
    result: Result
    src_info: Watch
    dtype: torch.dtype
    is_delivered: bool = False
    is_combined: bool = False


class LowLatency:
    """The low-latency half of a buffer. Arguments were checked by `Buffer`."""

    def __init__(self, wire: Wire, scrambler: Scrambler) -> None:
        self.order = LowLatencyOrder()
        self._wire = wire
        self._scrambler = scrambler
        self._num_dispatches = 0
        # By address of `src_info`, since the handle is a plain tuple in DeepEP.
        self._dispatches: dict[int, _Dispatch] = {}
        self._zero_copy_input: torch.Tensor | None = None

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        shape: Shape,
        transport: Transport,
        stats: torch.Tensor | None,
        *,
        is_asynchronous: bool,
        with_hook: bool,
    ) -> tuple[Received, Handle, EventOverlap, Hook | None]:
        """`x` [T, H], `topk_idx` [T, K]; `stats` [L] int32 grows by the counts."""
        sizes = _sizes(shape)
        self.order.check("low_latency_dispatch", sizes)
        num_local = shape.num_experts // self._wire.num_ranks
        tokens, choices = (topk_idx >= 0).nonzero(as_tuple=True)
        experts, by_expert = topk_idx[tokens, choices].sort(stable=True)
        tokens = tokens[by_expert]
        send_counts = torch.bincount(experts // num_local, minlength=self._wire.num_ranks).tolist()
        row_format = transport.row_format(shape.hidden_size)
        indexes = torch.stack([experts % num_local, tokens], dim=1)
        rows = row_format.pack(indexes, *(part[tokens] for part in transport.encode(x)))
        form = rows.shape[1] * 8 + transport.use_fp8 * 4 + transport.use_ue8m0 * 2
        receive_counts = self._wire.announce(Call.LOW_LATENCY_DISPATCH, shape, form, send_counts)
        incoming = self._wire.exchange(rows, send_counts, receive_counts)

        received = Received.new(shape, self._wire.num_ranks, transport)
        result = self.order.issue(
            "low_latency_dispatch", sizes, received.values[0], is_received=not with_hook
        )
        dispatch = self._remember(topk_idx, received.src_info, result, x.dtype)

        def fill() -> None:
            arrived, *values = row_format.unpack(incoming)
            sources = self._wire.sources(receive_counts)
            received.fill(arrived, values, sources, self._scrambler)
            if stats is not None:
                stats.add_(received.counts)
            dispatch.is_delivered = True

        handle = (received.src_info, received.layout_range, *sizes)
        return received, handle, *self._end(fill, is_asynchronous, with_hook)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        shape: Shape,
        out: torch.Tensor | None,
        *,
        zero_copy: bool,
        is_asynchronous: bool,
        with_hook: bool,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """`x` [L, C, H] in the places of dispatch; returns [T, H], the weighted sums."""
        dispatch = self._find(handle)
        sizes = _sizes(shape)
        self.order.check("low_latency_combine", sizes, consumes=dispatch.result)
        require(dispatch.is_delivered, "combine before the event of dispatch was waited for")
        require(not dispatch.is_combined, "a second combine of one dispatch")
        require(
            torch.equal(topk_idx, dispatch.topk_idx),
            "topk_idx of combine is not the topk_idx of its dispatch",
        )
        if zero_copy:
            given, x = x, self._zero_copy()
            require(given.dtype == x.dtype, f"zero_copy: x is {given.dtype}, not {x.dtype}")
        self._zero_copy_input = None
        combined = garbage((topk_idx.shape[0], shape.hidden_size), x.dtype)
        if out is not None:
            combined = fill_with_garbage(out)
        returned = self._return(x, handle, shape, dispatch, topk_idx)

        def fill() -> None:
            combined.copy_(weighted_sum(returned, topk_idx, topk_weights))

        dispatch.is_combined = dispatch.result.is_consumed = True
        self.order.issue(
            "low_latency_combine",
            sizes,
            combined if out is None else None,
            is_received=not with_hook,
        )
        return combined, *self._end(fill, is_asynchronous, with_hook)

    def _return(
        self,
        x: torch.Tensor,
        handle: Handle,
        shape: Shape,
        dispatch: _Dispatch,
        topk_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Send rows home: [T, K, H], garbage where an id is -1."""
        src_info, layout_range = handle[:2]
        send_counts, experts, slots = rows_by_source(layout_range)
        row_format = RowFormat(((torch.int32, 2), (x.dtype, shape.hidden_size)))
        global_experts = experts + self._wire.rank * src_info.shape[0]
        indexes = torch.stack([global_experts, src_info[experts, slots]], dim=1)
        rows = row_format.pack(indexes, x[experts, slots])
        form = dispatch.number * 64 + x.dtype.itemsize
        receive_counts = self._wire.announce(Call.LOW_LATENCY_COMBINE, shape, form, send_counts)
        incoming = self._wire.exchange(rows, send_counts, receive_counts)
        arrived, values = row_format.unpack(incoming)
        tokens = arrived[:, 1].long()
        choices = (topk_idx[tokens] == arrived[:, :1]).int().argmax(dim=1)
        returned = garbage((*topk_idx.shape, shape.hidden_size), x.dtype)
        returned[tokens, choices] = values
        return returned

    def next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """[L, C, H] for a combine with zero_copy; a row has room for scales behind it."""
        dispatch = self._find(handle)
        require(
            dispatch.number == self._num_dispatches - 1 and not dispatch.is_combined,
            "get_next_low_latency_combine_buffer: another low-latency call came after the dispatch",
        )
        num_local, num_rows = handle[0].shape
        hidden_size = handle[3]
        stride = hidden_size + 2 * (hidden_size // ALIGNMENT_CHANNELS)
        memory = garbage((num_local, num_rows, stride), dispatch.dtype)
        self._zero_copy_input = memory[:, :, :hidden_size]
        return self._zero_copy_input

    def _zero_copy(self) -> torch.Tensor:
        require(
            self._zero_copy_input is not None,
            "zero_copy: call get_next_low_latency_combine_buffer between dispatch and combine",
        )
        assert self._zero_copy_input is not None
        return self._zero_copy_input

    def clean(self, shape: Shape) -> None:
        """Zero the counters on all ranks. Collective."""
        self.order.check_received("clean_low_latency_buffer")
        self._wire.announce(Call.CLEAN_LOW_LATENCY_BUFFER, shape, 0)
        self.order.clean(_sizes(shape))

    def _end(
        self, fill: Hook, is_asynchronous: bool, with_hook: bool
    ) -> tuple[EventOverlap, Hook | None]:
        """Event and hook of a call whose results are there after `fill`."""
        delivery = Delivery(fill)
        if not with_hook:
            return finish(delivery, is_asynchronous), None

        def hook() -> None:
            require(not delivery.is_done, "a hook is called twice")
            delivery.deliver()
            self.order.receive()

        return EventOverlap(), hook

    def _remember(
        self, topk_idx: torch.Tensor, src_info: torch.Tensor, result: Result, dtype: torch.dtype
    ) -> _Dispatch:
        self._dispatches = {
            address: dispatch
            for address, dispatch in self._dispatches.items()
            if dispatch.src_info.is_in_use
        }
        dispatch = _Dispatch(self._num_dispatches, topk_idx.clone(), result, Watch(src_info), dtype)
        self._dispatches[src_info.data_ptr()] = dispatch
        self._num_dispatches += 1
        self._zero_copy_input = None
        return dispatch

    def _find(self, handle: Handle) -> _Dispatch:
        dispatch = self._dispatches.get(handle[0].data_ptr())
        require(
            dispatch is not None and dispatch.src_info.is_in_use,
            "the handle is not of a dispatch of this buffer",
        )
        assert dispatch is not None
        return dispatch


def _sizes(shape: Shape) -> Sizes:
    return shape.num_max_tokens, shape.hidden_size, shape.num_experts


def weighted_sum(
    returned: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] float32: over the choices of [T, K, H] in order, without those whose id is -1."""
    total = torch.zeros(returned.shape[0], returned.shape[2])
    for choice in range(topk_idx.shape[1]):
        is_used = topk_idx[:, choice] >= 0
        weights = topk_weights[is_used, choice, None]
        total[is_used] += weights * returned[is_used, choice].float()
    return total
