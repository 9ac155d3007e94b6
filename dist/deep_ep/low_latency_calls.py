"""The low-latency calls of the stand-in's `Buffer`: arguments checked, then carried out.

Signatures are DeepEP's own. Legend: T own tokens, N the most of them on a rank, K experts of a
token, H hidden size, R ranks, E experts, L = E / R.
"""

from collections.abc import Callable

import torch

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep.batched import Transport
from moed.dist.deep_ep.buffer_base import BufferBase
from moed.dist.deep_ep.events import EventOverlap
from moed.dist.deep_ep.low_latency import Handle
from moed.dist.deep_ep.rules import Shape, check_deterministic, check_ids, check_tensor, require
from moed.dist.deep_ep.wire import Rows, joined


class LowLatencyCalls(BufferBase):
    """See `moed.dist.deep_ep.buffer.Buffer`."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for `num_rdma_bytes`."""
        return limits.low_latency_rdma_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Needed after high-throughput calls and before other sizes. Collective."""
        self._check_alive()
        require(self.low_latency_mode, "the buffer was made without low_latency_mode")
        self._low_latency.clean(Shape(num_max_dispatch_tokens_per_rank, num_experts, hidden, 0))

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """[L, R x N, H] (with scales when `use_fp8`), counts [L] int32, handle, event, hook."""
        self._check_low_latency_call(async_finish, return_recv_hook, dispatch_wait_recv_cost_stats)
        self.rules.check_dtype(x.dtype, "x")
        check_tensor(x, "x", (-1, -1), x.dtype)
        num_tokens, hidden = x.shape
        check_tensor(topk_idx, "topk_idx", (num_tokens, -1), torch.int64)
        shape = Shape(num_max_dispatch_tokens_per_rank, num_experts, hidden, topk_idx.shape[1])
        self._check_low_latency_sizes(shape, num_tokens)
        check_ids(topk_idx, num_experts, are_distinct=True)
        require(round_scale or not use_ue8m0, "use_ue8m0 needs round_scale")
        if use_fp8:
            self.rules.check_fp8(hidden, use_ue8m0)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            expected = (num_experts // self.group_size,)
            check_tensor(stats, "cumulative_local_expert_recv_stats", expected, torch.int32)
        received, handle, event, hook = self._low_latency.dispatch(
            x,
            topk_idx,
            shape,
            Transport(x.dtype, use_fp8, round_scale, use_ue8m0 and use_fp8),
            stats,
            is_asynchronous=async_finish,
            with_hook=return_recv_hook,
        )
        return joined(received.values), received.counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """[T, H], the sums of rows times `topk_weights` [T, K] float32, event, hook."""
        self._check_low_latency_call(async_finish, return_recv_hook, combine_wait_recv_cost_stats)
        src_info, layout_range, num_max_tokens, hidden, num_experts = handle
        num_tokens, top_k = topk_idx.shape
        num_local = num_experts // self.group_size
        self.rules.check_dtype(x.dtype, "x")
        check_tensor(x, "x", (num_local, self.group_size * num_max_tokens, hidden), x.dtype)
        check_tensor(topk_idx, "topk_idx", (-1, -1), torch.int64)
        check_tensor(topk_weights, "topk_weights", (num_tokens, top_k), torch.float32)
        check_tensor(src_info, "src_info", tuple(x.shape[:2]), torch.int32)
        check_tensor(layout_range, "layout_range", (num_local, self.group_size), torch.int64)
        require(not (use_logfmt and zero_copy), "use_logfmt together with zero_copy")
        shape = Shape(num_max_tokens, num_experts, hidden, top_k)
        self._check_low_latency_sizes(shape, num_tokens)
        if out is not None:
            check_tensor(out, "out", (num_tokens, hidden), x.dtype)
        return self._low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            shape,
            out,
            zero_copy=zero_copy,
            is_asynchronous=async_finish,
            with_hook=return_recv_hook,
        )

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """[L, R x N, H] bfloat16 with a row stride above H, to fill for a zero-copy combine."""
        self._check_alive()
        return self._low_latency.next_combine_buffer(handle)

    def _check_low_latency_call(
        self, async_finish: bool, return_recv_hook: bool, stats: torch.Tensor | None
    ) -> None:
        self._check_alive()
        check_deterministic()
        require(self.low_latency_mode, "the buffer was made without low_latency_mode")
        require(not (async_finish and return_recv_hook), "async_finish with return_recv_hook")
        if stats is not None:
            check_tensor(stats, "wait_recv_cost_stats", (self.group_size,), torch.int64)

    def _check_low_latency_sizes(self, shape: Shape, num_tokens: int) -> None:
        self.rules.check_low_latency(
            shape, self.group_size, self.nvshmem_qp_depth, self._num_qps, self.num_rdma_bytes
        )
        require(
            num_tokens <= shape.num_max_tokens,
            f"{num_tokens} tokens, at most {shape.num_max_tokens}",
        )
