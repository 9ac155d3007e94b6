"""What the stand-in refuses, and the two modes that differ in it.

`strict` keeps every limit of DeepEP. `relaxed` lifts four of them, so that small models in any
dtype can run: hidden sizes, the dtype of rows, the divisibility of row counts, and rank counts.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from moed.config import deep_ep_limits as limits


class Mode(StrEnum):
    """How much of DeepEP's limits a stand-in keeps."""

    STRICT = "strict"
    RELAXED = "relaxed"


class ContractViolation(RuntimeError):
    """A call that DeepEP would refuse, or that it would not survive."""


def require(condition: bool, message: str) -> None:
    """Raise `ContractViolation` unless `condition` holds."""
    if not condition:
        raise ContractViolation(message)


@dataclass(frozen=True)
class Shape:
    """The sizes of one call, which all ranks must agree on."""

    num_max_tokens: int
    num_experts: int
    hidden_size: int
    top_k: int


@dataclass(frozen=True)
class Rules:
    """Checks of one mode. Every message names what was given and what is allowed."""

    mode: Mode

    @property
    def is_strict(self) -> bool:
        return self.mode is Mode.STRICT

    def check_dtype(self, dtype: torch.dtype, what: str) -> None:
        if self.is_strict:
            require(dtype == torch.bfloat16, f"{what} is {dtype}, it must be bfloat16")
        else:
            require(dtype.is_floating_point, f"{what} is {dtype}, it must be a float")

    def check_experts(self, num_experts: int, num_ranks: int) -> None:
        require(
            num_experts % num_ranks == 0 and num_experts > 0,
            f"{num_experts} experts do not divide over {num_ranks} ranks",
        )

    def check_low_latency(
        self, shape: Shape, num_ranks: int, qp_depth: int, num_qps: int, num_rdma_bytes: int
    ) -> None:
        """Sizes of a low-latency dispatch or combine, against those of the buffer."""
        tokens = shape.num_max_tokens
        self.check_experts(shape.num_experts, num_ranks)
        lowest, highest = limits.LOW_LATENCY_MIN_EXPERTS, limits.LOW_LATENCY_MAX_EXPERTS
        require(
            lowest <= shape.num_experts <= highest,
            f"{shape.num_experts} experts: between {lowest} and {highest} are served",
        )
        require(
            shape.top_k <= limits.LOW_LATENCY_MAX_TOP_K,
            f"top-k is {shape.top_k}, at most {limits.LOW_LATENCY_MAX_TOP_K}",
        )
        require(tokens > 0, f"num_max_dispatch_tokens_per_rank is {tokens}")
        require(
            2 * (tokens + 1) <= qp_depth,
            f"num_max_dispatch_tokens_per_rank {tokens} needs NVSHMEM_QP_DEPTH of at least "
            f"{2 * (tokens + 1)}, and it is {qp_depth}",
        )
        num_local_experts = shape.num_experts // num_ranks
        require(
            num_qps >= num_local_experts,
            f"num_qps_per_rank is {num_qps}, fewer than the {num_local_experts} experts of a rank",
        )
        needed = limits.low_latency_rdma_bytes(tokens, shape.hidden_size, shape.num_experts)
        require(
            needed <= num_rdma_bytes,
            f"num_rdma_bytes is {num_rdma_bytes}, and the call needs {needed}",
        )
        if self.is_strict:
            _check_low_latency_kernels(shape, num_ranks)

    def check_fp8(self, hidden_size: int, is_packed: bool) -> None:
        """`is_packed`: four scales in one int32."""
        channels = limits.ALIGNMENT_CHANNELS * (4 if self.is_strict or is_packed else 1)
        require(
            hidden_size % channels == 0,
            f"hidden size {hidden_size} is no multiple of {channels}, as use_fp8 needs",
        )

    def check_high_throughput(self, shape: Shape, row_bytes: int, num_ranks: int) -> None:
        """Sizes of a high-throughput dispatch; `row_bytes`: of one row of hidden values."""
        self.check_experts(shape.num_experts, num_ranks)
        most = limits.HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS
        if num_ranks > limits.GPUS_PER_NODE:
            most = limits.HIGH_THROUGHPUT_MAX_NODE_EXPERTS // limits.GPUS_PER_NODE
        num_local_experts = shape.num_experts // num_ranks
        require(num_local_experts <= most, f"{num_local_experts} experts on a rank, at most {most}")
        require(
            shape.top_k <= limits.HIGH_THROUGHPUT_MAX_TOP_K,
            f"top-k is {shape.top_k}, at most {limits.HIGH_THROUGHPUT_MAX_TOP_K}",
        )
        self._check_row_bytes(row_bytes, limits.HIGH_THROUGHPUT_ROW_MULTIPLE_BYTES)

    def check_elastic(self, shape: Shape, row_bytes: int, num_ranks: int) -> None:
        """Sizes of a dispatch or combine of `ElasticBuffer`."""
        require(num_ranks <= limits.ELASTIC_MAX_RANKS, f"{num_ranks} ranks are too many")
        self.check_experts(shape.num_experts, num_ranks)
        for what, given, most in (
            ("experts", shape.num_experts, limits.ELASTIC_MAX_EXPERTS),
            (
                "experts on a rank",
                shape.num_experts // num_ranks,
                limits.ELASTIC_MAX_LOCAL_EXPERTS,
            ),
            ("top-k", shape.top_k, limits.ELASTIC_MAX_TOP_K),
        ):
            require(given <= most, f"{what}: {given}, at most {most}")
        require(shape.num_max_tokens > 0, "num_max_tokens_per_rank must be above 0")
        self._check_row_bytes(row_bytes, limits.ELASTIC_ROW_MULTIPLE_BYTES)
        if self.is_strict:
            multiple = limits.ELASTIC_HIDDEN_MULTIPLE
            require(
                shape.hidden_size % multiple == 0,
                f"hidden size {shape.hidden_size} is no multiple of {multiple}",
            )

    def _check_row_bytes(self, row_bytes: int, multiple: int) -> None:
        if self.is_strict:
            require(row_bytes % multiple == 0, f"a row of {row_bytes} bytes: not x {multiple}")


def _check_low_latency_kernels(shape: Shape, num_ranks: int) -> None:
    """What the kernels were compiled for."""
    sizes = limits.LOW_LATENCY_HIDDEN_SIZES
    require(
        shape.hidden_size in sizes, f"hidden size {shape.hidden_size}: served are {sorted(sizes)}"
    )
    rows, multiple = num_ranks * shape.num_max_tokens, limits.LOW_LATENCY_ROWS_MULTIPLE
    require(rows % multiple == 0, f"{rows} rows for an expert are no multiple of {multiple}")


def check_deterministic() -> None:
    """torch must not fill new tensors, which would race with DeepEP's own stream."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    require(
        not (torch.are_deterministic_algorithms_enabled() and fills),
        "deterministic algorithms together with torch.utils.deterministic."
        "fill_uninitialized_memory: switch the latter off",
    )


def check_tensor(
    tensor: torch.Tensor, what: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Shape (-1: any size), dtype and contiguity of an argument."""
    given = tuple(tensor.shape)
    fits = len(given) == len(shape) and all(b in (-1, a) for a, b in zip(given, shape, strict=True))
    require(
        fits and tensor.dtype == dtype and tensor.is_contiguous(),
        f"{what} is {tensor.dtype} {list(given)} with strides {tensor.stride()}, it must be "
        f"{dtype} {list(shape)} and contiguous",
    )


def check_ids(topk_idx: torch.Tensor, num_experts: int, *, are_distinct: bool) -> None:
    """[T, K]: every id is an expert or -1. `are_distinct`: a token names an expert once only."""
    if topk_idx.numel() == 0:
        return
    low, high = int(topk_idx.min()), int(topk_idx.max())
    require(
        low >= -1 and high < num_experts,
        f"expert ids lie in {low}..{high}, they must lie in -1..{num_experts - 1}",
    )
    if are_distinct:
        ids = topk_idx.sort(dim=1).values
        is_twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        require(not bool(is_twice.any()), "a token names one expert twice")
