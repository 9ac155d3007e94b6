"""What `ElasticBuffer` of the stand-in is and checks, apart from its two calls.

Signatures are DeepEP's own. Legend: T own tokens, N the most of them on a rank, K experts of a
token, H hidden size, R ranks, E experts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep.elastic_handle import EPHandle
from moed.dist.deep_ep.elastic_rows import Options
from moed.dist.deep_ep.events import EventHandle
from moed.dist.deep_ep.rules import (
    Mode,
    Rules,
    Shape,
    check_deterministic,
    check_ids,
    check_tensor,
    require,
)
from moed.dist.deep_ep.wire import Call, Rows, Scrambler, Wire

HYBRID_QPS = 129
DIRECT_QPS = 17


@dataclass(frozen=True)
class Request:
    """The checked arguments of a dispatch."""

    values: list[torch.Tensor]
    """[T, H], and scales."""
    topk_idx: torch.Tensor
    shape: Shape
    options: Options


class ElasticBase:
    """See `moed.dist.deep_ep.elastic.ElasticBuffer`."""

    rules: ClassVar[Rules] = Rules(Mode.STRICT)

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective over `group`. Without `num_bytes` the size follows from N, H and K."""
        self.group = group
        self.rank_idx = group.rank()
        self.num_ranks = group.size()
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or (
            HYBRID_QPS if allow_hybrid_mode else DIRECT_QPS
        )
        self.explicitly_destroy = explicitly_destroy
        require(num_cpu_bytes == 0, "the stand-in has no memory beside the CPU's")
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        alignment = limits.ELASTIC_ALIGNMENT_BYTES
        require(num_bytes % alignment == 0, f"num_bytes {num_bytes}: no multiple of {alignment}")
        self.num_bytes = num_bytes
        self._is_destroyed = False
        self._wire = Wire(group)
        self._scrambler = Scrambler(self.rank_idx)
        shape = Shape(num_max_tokens_per_rank, 0, hidden, num_topk)
        self._wire.announce(Call.BUFFER, shape, num_bytes + deterministic)

    def destroy(self) -> None:
        """Collective; only with `explicitly_destroy`. Safe to call twice."""
        require(self.explicitly_destroy, "destroy() needs explicitly_destroy=True")
        if not self._is_destroyed:
            self._wire.announce(Call.DESTROY, Shape(0, 0, 0, 0), 0)
            self._is_destroyed = True

    @staticmethod
    def capture() -> EventHandle:
        """An event that has passed."""
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes for `num_bytes`; K = 0 counts as the most there can be."""
        require(
            num_max_tokens_per_rank > 0 and hidden > 0,
            f"N {num_max_tokens_per_rank} and H {hidden} must be above 0",
        )
        return _needed_bytes(
            group.size(),
            Shape(num_max_tokens_per_rank, 0, hidden, num_topk or limits.ELASTIC_MAX_TOP_K),
            use_fp8_dispatch,
        )

    def get_theoretical_num_sms(self, num_experts: int | None, num_topk: int) -> int:
        """Multiprocessors for a call, where there are none. Fails without `num_experts`, as DeepEP
        does.
        """
        require(num_experts is not None, "pass num_sms or num_experts")
        return limits.HIGH_THROUGHPUT_NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queues for a call."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def _begin(self, previous_event: EventHandle | None, allocate_on_comm_stream: bool) -> None:
        require(not self._is_destroyed, "the buffer is destroyed")
        check_deterministic()
        if previous_event is not None:
            require(
                isinstance(previous_event, EventHandle),
                "previous_event is no EventHandle, as capture() returns",
            )
            require(allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")

    def _num_sms(self, num_sms: int, num_qps: int, num_experts: int | None) -> int:
        """As given, else estimated, before anything is taken from a handle."""
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, 0)
        num_qps = num_qps or self.get_theoretical_num_qps(num_sms)
        require(
            num_qps <= self.num_allocated_qps,
            f"num_qps is {num_qps}, and {self.num_allocated_qps} are allocated",
        )
        return num_sms

    def _check_rows(self, x: Rows) -> list[torch.Tensor]:
        """[T, H], and scales of 4 bytes in any strides."""
        if not isinstance(x, tuple):
            self.rules.check_dtype(x.dtype, "x")
            check_tensor(x, "x", (-1, -1), x.dtype)
            return [x]
        data, scales = x
        check_tensor(data, "x", (-1, -1), torch.float8_e4m3fn)
        num_tokens = data.shape[0]
        require(
            scales.dim() == 2 and scales.shape[0] == num_tokens and scales.element_size() == 4,
            f"scales are {scales.dtype} {list(scales.shape)}: {num_tokens} rows of 4-byte numbers",
        )
        return [data, scales]

    def _request(
        self,
        values: list[torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_experts: int | None,
        num_max_tokens: int | None,
        alignment: int | None,
        do_cpu_sync: bool | None,
        do_expand: bool,
        handle: EPHandle | None,
    ) -> Request:
        if handle is not None:
            require(topk_idx is None, "topk_idx together with a handle")
            require(not do_cpu_sync, "do_cpu_sync together with a handle")
            require(
                num_experts in (None, handle.num_experts)
                and alignment in (None, handle.expert_alignment)
                and num_max_tokens in (None, handle.num_max_tokens_per_rank)
                and do_expand == handle.do_expand,
                "experts, alignment, tokens per rank and do_expand must be those of the handle",
            )
            topk_idx, num_experts = handle.topk_idx, handle.num_experts
            alignment, num_max_tokens = handle.expert_alignment, handle.num_max_tokens_per_rank
            do_cpu_sync = False
        require(topk_idx is not None and num_experts is not None, "topk_idx, num_experts: missing")
        assert topk_idx is not None and num_experts is not None
        num_tokens, hidden = values[0].shape
        check_tensor(topk_idx, "topk_idx", (num_tokens, -1), torch.int64)
        if num_max_tokens is None:
            num_max_tokens = self.num_max_tokens_per_rank
        shape = Shape(num_max_tokens, num_experts, hidden, topk_idx.shape[1])
        self._check_sizes(shape, values[0], num_tokens)
        check_ids(topk_idx, num_experts, are_distinct=True)
        if topk_weights is not None:
            check_tensor(topk_weights, "topk_weights", tuple(topk_idx.shape), torch.float32)
        options = Options(
            num_max_tokens,
            num_experts // self.num_ranks,
            1 if alignment is None else alignment,
            self.deterministic,
            do_cpu_sync is not False,
        )
        return Request(values, topk_idx, shape, options)

    def _check_sizes(self, shape: Shape, x: torch.Tensor, num_tokens: int) -> None:
        """Of a call with rows `x` [., H], for `num_tokens` own tokens."""
        self.rules.check_elastic(shape, x.shape[1] * x.element_size(), self.num_ranks)
        require(
            num_tokens <= shape.num_max_tokens,
            f"{num_tokens} tokens, at most {shape.num_max_tokens}",
        )
        needed = _needed_bytes(self.num_ranks, shape, x.dtype == torch.float8_e4m3fn)
        require(
            needed <= self.num_bytes, f"num_bytes is {self.num_bytes}, and the call needs {needed}"
        )

    def _check_stats(
        self, stats: torch.Tensor | None, request: Request, handle: EPHandle | None
    ) -> None:
        if stats is None:
            return
        require(handle is None, "no statistics with a handle")
        expected = (request.options.num_local_experts,)
        check_tensor(stats, "cumulative_local_expert_recv_stats", expected, torch.int32)


def _needed_bytes(num_ranks: int, shape: Shape, is_fp8: bool) -> int:
    """As DeepEP counts, which is 2 bytes for a value that is not of 8 bits."""
    return limits.elastic_bytes(
        num_ranks,
        shape.num_max_tokens,
        shape.hidden_size,
        shape.top_k,
        itemsize=1 if is_fp8 else 2,
        with_scales=is_fp8,
    )
