"""Low-latency calls that DeepEP refuses or traps on are refused, before any rank waits."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from moed.dist.deep_ep.rules import check_ids
from moed.dist.deep_ep.stand_in import make_stand_in
from moed.dist.groups import Groups
from tests.dist.deep_ep.loads import refusal
from tests.worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]
H, N, E, K = 2048, 8, 8, 3
LARGE = 2**33


def make_buffer(groups: Groups, mode: str, **changes: Any) -> Any:
    options = {"num_rdma_bytes": LARGE, "low_latency_mode": True, "num_qps_per_rank": 512}
    return make_stand_in(mode).Buffer(groups.device, **{**options, **changes})


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a dispatch that is legal on two ranks."""
    num_tokens, hidden = changes.pop("size", (2, H))
    ids = torch.arange(changes.pop("top_k", K)).repeat(num_tokens, 1)
    return {
        "x": torch.ones(num_tokens, hidden, dtype=torch.bfloat16),
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": N,
        "num_experts": E,
        "use_fp8": False,
        **changes,
    }


def int32(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


# Lifted by the relaxed mode, then kept by both.
LIFTED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"size": (2, 2816)}, "hidden size 2816: served are [2048, 2560"),
    "odd hidden size": ({"size": (2, 7)}, "hidden size 7: served are"),
    "row count": (
        {"num_max_dispatch_tokens_per_rank": 3},
        "6 rows for an expert are no multiple of 4",
    ),
    "float32": ({"x": torch.ones(2, H)}, "x is torch.float32, it must be bfloat16"),
    "float16": ({"x": torch.ones(2, H).half()}, "x is torch.float16, it must be bfloat16"),
}
KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "top-k": ({"num_experts": 16, "top_k": 12}, "top-k is 12, at most 11"),
    "experts": ({"num_experts": 7}, "7 experts do not divide over 2 ranks"),
    "too many experts": ({"num_experts": 1850}, "1850 experts: between 2 and 1848"),
    "no experts": ({"num_experts": 0}, "0 experts do not divide"),
    "tokens": ({"size": (9, H)}, "9 tokens, at most 8"),
    "no tokens": (
        {"num_max_dispatch_tokens_per_rank": 0},
        "num_max_dispatch_tokens_per_rank is 0",
    ),
    "queue depth": (
        {"num_max_dispatch_tokens_per_rank": 512},
        "512 needs NVSHMEM_QP_DEPTH of at least 1026, and it is 1024",
    ),
    "integers": ({"x": torch.ones(2, H, dtype=torch.int64)}, "x is torch.int64"),
    "transposed": ({"x": torch.ones(H, 2, dtype=torch.bfloat16).T}, "contiguous"),
    "int32 ids": ({"topk_idx": int32(2, K)}, "topk_idx is torch.int32"),
    "ids of others": (
        {"topk_idx": torch.zeros(3, K, dtype=torch.int64)},
        "must be torch.int64 [2,",
    ),
    "an id beyond": ({"topk_idx": torch.tensor([[0, 8]] * 2)}, "0..8, they must lie in -1..7"),
    "an id below": ({"topk_idx": torch.tensor([[0, -2]] * 2)}, "-2..0, they must lie in -1..7"),
    "twice": ({"topk_idx": torch.tensor([[1, 1]] * 2)}, "a token names one expert twice"),
    "packed scales": ({"use_ue8m0": True, "use_fp8": True}, "use_ue8m0 needs round_scale"),
    "two ways to wait": (
        {"async_finish": True, "return_recv_hook": True},
        "async_finish with return_recv_hook",
    ),
    "statistics": ({"cumulative_local_expert_recv_stats": int32(E)}, "int32 [4] and contiguous"),
    # Documented as [R, R], and checked as [R].
    "costs": (
        {"dispatch_wait_recv_cost_stats": torch.zeros(2, 2, dtype=torch.int64)},
        "int64 [2] and contiguous",
    ),
}


def dispatch_messages(groups: Groups, mode: str) -> dict[str, str]:
    buffer = make_buffer(groups, mode)
    tried = KEPT if mode == "relaxed" else {**LIFTED, **KEPT}
    messages = {
        name: refusal(lambda: buffer.low_latency_dispatch(**arguments(**dict(changes))))  # noqa: B023
        for name, (changes, _) in tried.items()
    }
    # Other refusals have to leave the buffer usable.
    assert refusal(lambda: buffer.low_latency_dispatch(**arguments())) == ""
    return messages


@pytest.mark.parametrize("mode", ["strict", "relaxed"])
def test_dispatches_are_refused(workers: Pools, mode: str) -> None:
    for messages in workers(2).run(dispatch_messages, mode):
        missing = {
            name: message
            for name, message in messages.items()
            if {**LIFTED, **KEPT}[name][1] not in message
        }
        assert missing == {}


def lifted_messages(groups: Groups) -> list[str]:
    messages = []
    for changes, _ in LIFTED.values():
        buffer = make_buffer(groups, "relaxed")
        call = arguments(**dict(changes))
        messages.append(refusal(lambda: buffer.low_latency_dispatch(**call)))  # noqa: B023
    return messages


def test_the_relaxed_mode_lifts_sizes_and_dtypes(workers: Pools) -> None:
    assert workers(2).run(lifted_messages) == [[""] * len(LIFTED)] * 2


def buffer_messages(groups: Groups) -> dict[str, str]:
    cls = make_stand_in("strict").Buffer
    tried: dict[str, dict[str, Any]] = {
        "unaligned": {"num_nvl_bytes": 100},
        "unaligned rdma": {"num_rdma_bytes": 100, "low_latency_mode": True},
        "negative": {"num_nvl_bytes": -128},
        "32 GiB": {"num_rdma_bytes": 2**35, "low_latency_mode": True},
        "both large": {
            "num_nvl_bytes": 2**31,
            "num_rdma_bytes": 128,
            "low_latency_mode": True,
        },
        "rdma on one node": {"num_rdma_bytes": 128},
        "no queues": {"num_qps_per_rank": 0},
    }
    messages = {
        name: refusal(lambda: cls(groups.device, **options))  # noqa: B023
        for name, options in tried.items()
    }
    few = make_buffer(groups, "strict", num_qps_per_rank=3)
    small = make_buffer(groups, "strict", num_rdma_bytes=128)
    plain = cls(groups.device)
    with mock.patch.dict("os.environ", {"NVSHMEM_QP_DEPTH": "1026"}):
        deep = make_buffer(groups, "strict")
    long = arguments(num_max_dispatch_tokens_per_rank=512, num_experts=2, top_k=2)
    messages |= {
        "few queues": refusal(lambda: few.low_latency_dispatch(**arguments())),
        "small": refusal(lambda: small.low_latency_dispatch(**arguments())),
        "plain": refusal(lambda: plain.low_latency_dispatch(**arguments())),
        "deep": refusal(lambda: deep.low_latency_dispatch(**long)),
        "too deep": refusal(
            lambda: deep.low_latency_dispatch(**{**long, "num_max_dispatch_tokens_per_rank": 514})
        ),
    }
    return messages


def test_buffers_are_refused(workers: Pools) -> None:
    parts = {
        "unaligned": "num_nvl_bytes is 100: it must be a multiple of 128",
        "unaligned rdma": "num_rdma_bytes is 100: it must be a multiple of 128",
        "negative": "num_nvl_bytes is -128",
        "32 GiB": "below 34359738368",
        "both large": "with RDMA at most 2147483647",
        "rdma on one node": "on one node without low_latency_mode",
        "no queues": "num_qps_per_rank is 0",
        "few queues": "num_qps_per_rank is 3, fewer than the 4 experts of a rank",
        "small": "num_rdma_bytes is 128, and the call needs",
        "plain": "the buffer was made without low_latency_mode",
        "too deep": "514 needs NVSHMEM_QP_DEPTH of at least 1030, and it is 1026",
    }
    for messages in workers(2).run(buffer_messages):
        assert messages.pop("deep") == ""
        assert {name for name, part in parts.items() if part not in messages[name]} == set()


def combine_messages(groups: Groups) -> dict[str, str]:
    buffer = make_buffer(groups, "strict")
    call = arguments()
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(**call)
    right = {
        "x": recv_x,
        "topk_idx": call["topk_idx"],
        "topk_weights": torch.ones(2, K),
        "handle": handle,
    }
    tried: dict[str, dict[str, Any]] = {
        "x": {"x": recv_x[:, :-1].contiguous()},
        "float32": {"x": recv_x.float()},
        "slice": {"x": torch.empty(4, 16, H + 32, dtype=torch.bfloat16)[:, :, :H]},
        "weights": {"topk_weights": torch.ones(2, K + 1)},
        "half weights": {"topk_weights": torch.ones(2, K).half()},
        "lossy copy": {"use_logfmt": True, "zero_copy": True},
        "two ways to wait": {"async_finish": True, "return_recv_hook": True},
        "out": {"out": torch.empty(3, H, dtype=torch.bfloat16)},
    }
    messages = {
        name: refusal(lambda: buffer.low_latency_combine(**{**right, **changes}))  # noqa: B023
        for name, changes in tried.items()
    }
    torch.use_deterministic_algorithms(True)
    try:
        messages["deterministic"] = refusal(lambda: buffer.low_latency_combine(**right))
    finally:
        torch.use_deterministic_algorithms(False)
    assert refusal(lambda: buffer.low_latency_combine(**right)) == ""
    return messages


def test_combines_are_refused(workers: Pools) -> None:
    parts = {
        "x": "it must be torch.bfloat16 [4, 16, 2048]",
        "float32": "it must be bfloat16",
        "slice": "contiguous",
        "weights": "topk_weights is",
        "half weights": "torch.float16",
        "lossy copy": "use_logfmt together with zero_copy",
        "two ways to wait": "async_finish with return_recv_hook",
        "out": "out is",
        "deterministic": "fill_uninitialized_memory",
    }
    for messages in workers(2).run(combine_messages):
        assert {name for name, part in parts.items() if part not in messages[name]} == set()


def test_no_token_is_no_mistake() -> None:
    check_ids(torch.empty(0, K, dtype=torch.int64), E, are_distinct=True)
    check_ids(torch.tensor([[-1, -1, 0]]), E, are_distinct=True)


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="lenient"):
        make_stand_in("lenient")
