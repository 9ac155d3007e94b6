"""`Buffer` of the stand-in: DeepEP's class for low-latency and high-throughput calls.

Signatures, defaults included, are DeepEP's own. Legend: T own tokens, N the most of them on a
rank, K experts of a token, H hidden size, R ranks, E experts, L = E / R, M rows received.
"""

import torch

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep import configs
from moed.dist.deep_ep.buffer_base import BufferBase
from moed.dist.deep_ep.configs import Config
from moed.dist.deep_ep.events import EventHandle, EventOverlap
from moed.dist.deep_ep.high_throughput import Handle, Layout, dispatch_layout
from moed.dist.deep_ep.low_latency_calls import LowLatencyCalls
from moed.dist.deep_ep.rules import (
    Mode,
    Rules,
    Shape,
    check_deterministic,
    check_ids,
    check_tensor,
    require,
)
from moed.dist.deep_ep.wire import Rows, joined


class Buffer(LowLatencyCalls):
    """Keeps every limit of DeepEP, and is stricter: results that are not there, and rows that
    nobody sent, are NaN; rows come in random order; a wrong order of calls, and calls that differ
    between ranks, raise `ContractViolation` where DeepEP hangs or miscounts.
    """

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The recommended settings of `dispatch`."""
        return configs.recommended(configs.DISPATCH, num_ranks, BufferBase.num_sms, is_strict=True)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The recommended settings of `combine`."""
        return configs.recommended(configs.COMBINE, num_ranks, BufferBase.num_sms, is_strict=True)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Tokens for each rank [R], for each node or None, for each expert [E], all int32, and
        is_token_in_rank [T, R] bool, of ids [T, K]. No collective.
        """
        self._check_alive()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        check_tensor(topk_idx, "topk_idx", (-1, -1), torch.int64)
        self.rules.check_experts(num_experts, self.group_size)
        check_ids(topk_idx, num_experts, are_distinct=False)
        layout = dispatch_layout(topk_idx, num_experts, self.group_size)
        return (
            layout.num_tokens_per_rank,
            layout.num_tokens_per_rdma_rank,
            layout.num_tokens_per_expert,
            layout.is_token_in_rank,
            EventOverlap(EventHandle() if async_finish else None),
        )

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        Handle | None,
        EventOverlap,
    ]:
        """Rows [M, H], local ids [M, K], weights [M, K], counts by expert, handle, event.

        With `handle`: the routing of an earlier dispatch again, and None in the middle.
        """
        self._begin_high_throughput(
            "dispatch", previous_event, async_finish, allocate_on_comm_stream
        )
        values = self._check_rows(x)
        config = config or self.get_dispatch_config(self.group_size)
        self._check_room(config, values[0])
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "topk together with a handle")
            require(handle[4].shape[0] == values[0].shape[0], "another number of rows than before")
            again, event = self._high_throughput.dispatch_again(
                values, handle, is_asynchronous=async_finish
            )
            return joined(again), None, None, None, None, event
        require(
            topk_idx is not None and topk_weights is not None,
            "topk_idx and topk_weights are missing: the stand-in carries no rows without them",
        )
        assert topk_idx is not None and topk_weights is not None
        layout = self._check_layout(
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            num_tokens_per_expert,
            is_token_in_rank,
            topk_idx,
        )
        num_tokens, top_k = topk_idx.shape
        check_tensor(topk_weights, "topk_weights", (num_tokens, top_k), torch.float32)
        require(num_tokens == values[0].shape[0], "x and topk_idx differ in tokens")
        require(
            num_worst_tokens == 0 or self.group_size <= limits.GPUS_PER_NODE,
            "num_worst_tokens works on one node only",
        )
        row_bytes = values[0].shape[1] * values[0].element_size()
        shape = Shape(0, layout.num_tokens_per_expert.shape[0], values[0].shape[1], top_k)
        self.rules.check_high_throughput(shape, row_bytes, self.group_size)
        received = self._high_throughput.dispatch(
            values,
            topk_idx,
            topk_weights,
            layout,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            is_asynchronous=async_finish,
        )
        return (
            joined(received.values),
            received.topk_idx,
            received.topk_weights,
            received.num_tokens_per_expert,
            received.handle,
            received.event,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """[T, H], the sums of rows `x` [M, H] without weights, and sums of weights [T, K]."""
        self._begin_high_throughput(
            "combine", previous_event, async_finish, allocate_on_comm_stream
        )
        self.rules.check_dtype(x.dtype, "x")
        num_rows, num_tokens = handle[3].shape[0], handle[4].shape[0]
        check_tensor(x, "x", (num_rows, -1), x.dtype)
        if topk_weights is not None:
            check_tensor(topk_weights, "topk_weights", (num_rows, -1), torch.float32)
        parts = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
        for part in parts:
            check_tensor(part, "bias", (num_tokens, x.shape[1]), x.dtype)
        self._check_room(config or self.get_combine_config(self.group_size), x)
        return self._high_throughput.combine(
            x, handle, topk_weights, parts, is_asynchronous=async_finish
        )

    def _begin_high_throughput(
        self,
        name: str,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        self._check_alive()
        check_deterministic()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        self._low_latency.order.check_received(name)
        self._low_latency.order.soil(name)

    def _check_rows(self, x: Rows) -> list[torch.Tensor]:
        """[T, H], and scales."""
        if not isinstance(x, tuple):
            self.rules.check_dtype(x.dtype, "x")
            check_tensor(x, "x", (-1, -1), x.dtype)
            return [x]
        data, scales = x
        check_tensor(data, "x", (-1, -1), torch.float8_e4m3fn)
        require(
            scales.dim() == 2
            and scales.shape[0] == data.shape[0]
            and scales.dtype in (torch.float32, torch.int32),
            f"scales are {scales.dtype} {list(scales.shape)}, they must be float32 or int32, one "
            f"row for each of {data.shape[0]} tokens",
        )
        return [data, scales]

    def _check_room(self, config: Config, x: torch.Tensor) -> None:
        row_bytes = x.shape[1] * max(x.element_size(), 2)
        for what, given, needed in (
            (
                "num_nvl_bytes",
                self.num_nvl_bytes,
                config.get_nvl_buffer_size_hint(row_bytes, self.group_size),
            ),
            (
                "num_rdma_bytes",
                self.num_rdma_bytes,
                config.get_rdma_buffer_size_hint(row_bytes, self.group_size),
            ),
        ):
            require(needed <= given, f"{what} is {given}, and the call needs {needed}")

    def _check_layout(
        self,
        per_rank: torch.Tensor | None,
        per_node: torch.Tensor | None,
        per_expert: torch.Tensor | None,
        is_in_rank: torch.Tensor | None,
        topk_idx: torch.Tensor,
    ) -> Layout:
        """The layout that was given, which must be the one of `topk_idx` [T, K]."""
        require(
            per_rank is not None and per_expert is not None and is_in_rank is not None,
            "the results of get_dispatch_layout are missing",
        )
        assert per_rank is not None and per_expert is not None and is_in_rank is not None
        check_tensor(topk_idx, "topk_idx", (-1, -1), torch.int64)
        num_experts = per_expert.shape[0]
        self.rules.check_experts(num_experts, self.group_size)
        check_ids(topk_idx, num_experts, are_distinct=False)
        expected = dispatch_layout(topk_idx, num_experts, self.group_size)
        pairs = [
            (per_rank, expected.num_tokens_per_rank),
            (per_expert, expected.num_tokens_per_expert),
            (is_in_rank, expected.is_token_in_rank),
        ]
        if expected.num_tokens_per_rdma_rank is not None:
            require(per_node is not None, "num_tokens_per_rdma_rank is missing")
            assert per_node is not None
            pairs.append((per_node, expected.num_tokens_per_rdma_rank))
        for given, own in pairs:
            require(
                given.dtype == own.dtype and torch.equal(given, own),
                "the layout is not the one of get_dispatch_layout for these ids",
            )
        return expected


class RelaxedBuffer(Buffer):
    """`Buffer` for any hidden size, dtype of rows, row count and rank count."""

    rules = Rules(Mode.RELAXED)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """As for the next larger rank count that DeepEP knows."""
        return configs.recommended(configs.DISPATCH, num_ranks, BufferBase.num_sms, is_strict=False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """As for the next larger rank count that DeepEP knows."""
        return configs.recommended(configs.COMBINE, num_ranks, BufferBase.num_sms, is_strict=False)


def _check_streams(
    previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
) -> None:
    require(
        not allocate_on_comm_stream or (previous_event is not None and async_finish),
        "allocate_on_comm_stream needs previous_event and async_finish",
    )
