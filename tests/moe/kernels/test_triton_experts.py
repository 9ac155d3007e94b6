"""Triton experts of both formats equal the obvious reference: odd sizes, experts without rows,
choices of other ranks, all rows at one expert.
"""

import pytest
import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts import (
    Experts,
    ExpertWeights,
    TorchBatchedExperts,
    TorchExperts,
    reference_batched_experts,
    reference_experts,
)
from moed.moe.experts.torch_grouped import TorchGroupedExperts
from tests.moe.host_reads import HostRead, no_host_reads

pytest.importorskip("triton")

from moed.moe.experts.triton_batched import TritonBatchedExperts  # noqa: E402
from moed.moe.experts.triton_standard import TritonExperts  # noqa: E402

HIDDEN, SIZE = 40, 24
DTYPES = [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
BY_DTYPE = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)

IDS = {
    "one row": [[1, 0]],
    "other ranks": [[-1, -1], [2, -1], [-1, 0]],
    "nothing local": [[-1, -1], [-1, -1]],
    "one expert": [[2, -1]] * 19,
    "blocks of several sizes": [[0, 2]] * 17 + [[2, 1], [-1, 2]],
}
COUNTS = {
    "nothing": [0, 0, 0],
    "one row": [0, 1, 0],
    "one expert, full": [0, 0, 19],
    "several sizes": [17, 0, 3],
}


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(num_experts: int, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    gate_up = random(1, num_experts, 2 * SIZE, HIDDEN) / 4
    down = random(2, num_experts, HIDDEN, SIZE) / 4
    return ExpertWeights.plain(gate_up.to(device, dtype), down.to(device, dtype))


def standard(ids: list[list[int]], dtype: torch.dtype, device: torch.device) -> Dispatched:
    """Rows that nobody here asks for hold NaN."""
    hidden = random(3, len(ids), HIDDEN)
    for row, choices in enumerate(ids):
        if max(choices) < 0:
            hidden[row] = torch.nan
    weights = random(4, len(ids), 2).abs()
    expert_ids = torch.tensor(ids, dtype=torch.int64, device=device).view(len(ids), 2)
    return Dispatched(hidden.to(device, dtype), expert_ids, weights.to(device), None, None)


def batched(counts: list[int], dtype: torch.dtype, device: torch.device) -> Dispatched:
    """Rows beyond the counts hold NaN, and rows lie apart, as in a transport's buffer."""
    capacity = 19
    wide = torch.full((len(counts), capacity, HIDDEN + 8), torch.nan)
    for expert, count in enumerate(counts):
        wide[expert, :count] = random(expert, count, HIDDEN + 8)
    num_rows = torch.tensor(counts, dtype=torch.int32, device=device)
    return Dispatched(wide.to(device, dtype)[..., :HIDDEN], None, None, num_rows, None)


def on_cpu(dispatched: Dispatched) -> Dispatched:
    def moved(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.cpu()

    return Dispatched(
        dispatched.hidden.cpu(),
        moved(dispatched.expert_ids),
        moved(dispatched.expert_weights),
        moved(dispatched.num_rows_per_expert),
        None,
    )


@pytest.mark.parametrize("apply_weights", [True, False])
@pytest.mark.parametrize("implementation", [TritonExperts, TorchGroupedExperts])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@BY_DTYPE
def test_standard_equals_the_reference(
    dtype: torch.dtype,
    tolerance: float,
    ids: list[list[int]],
    implementation: type[TritonExperts] | type[TorchGroupedExperts],
    apply_weights: bool,
    device: torch.device,
) -> None:
    weights, dispatched = weights_of(3, dtype, device), standard(ids, dtype, device)
    experts = implementation(weights)
    found = experts(dispatched, apply_weights)
    assert found.dtype == dtype
    expected = reference_experts(
        on_cpu(dispatched), weights.gate_up.values.cpu(), weights.down.values.cpu(), apply_weights
    )
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    assert experts.rows_per_slot.tolist() == [
        sum(choices.count(expert) for choices in ids) for expert in range(3)
    ]


@pytest.mark.parametrize("implementation", [TritonExperts, TorchGroupedExperts])
@pytest.mark.parametrize(("num_experts", "ids"), [(3, []), (0, [[-1, -1]])])
def test_no_rows_and_no_experts(
    num_experts: int,
    ids: list[list[int]],
    implementation: type[TritonExperts] | type[TorchGroupedExperts],
    device: torch.device,
) -> None:
    experts = implementation(weights_of(num_experts, torch.float32, device))
    dispatched = standard(ids, torch.float32, device)
    assert torch.equal(experts(dispatched, True).cpu(), torch.zeros(len(ids), HIDDEN))
    assert int(experts.rows_per_slot.sum()) == 0


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@BY_DTYPE
def test_batched_equals_the_reference(
    dtype: torch.dtype, tolerance: float, counts: list[int], device: torch.device
) -> None:
    weights, dispatched = weights_of(3, dtype, device), batched(counts, dtype, device)
    experts = TritonBatchedExperts(weights)
    found = experts(dispatched, False)
    assert found.shape == dispatched.hidden.shape and found.dtype == dtype
    expected = reference_batched_experts(
        on_cpu(dispatched), weights.gate_up.values.cpu(), weights.down.values.cpu()
    )
    for expert, count in enumerate(counts):
        torch.testing.assert_close(
            found[expert, :count].cpu().float(),
            expected[expert, :count],
            rtol=tolerance,
            atol=tolerance,
        )
    assert experts.rows_per_slot.tolist() == counts


def test_batched_leaves_other_rows_alone(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    counts, mark, real = [17, 0, 3], -7.0, torch.empty
    dispatched = batched(counts, torch.float32, device)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real(*a, **k).fill_(mark))
    found = TritonBatchedExperts(weights_of(3, torch.float32, device))(dispatched, False)
    for expert, count in enumerate(counts):
        assert torch.all(found[expert, count:] == mark)
        assert not torch.any(found[expert, :count] == mark)


def test_batched_without_experts(device: torch.device) -> None:
    experts = TritonBatchedExperts(weights_of(0, torch.float32, device))
    assert experts(batched([], torch.float32, device), False).shape == (0, 19, HIDDEN)


def test_router_weights_are_not_the_batched_kernel_s_business(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="combine applies"):
        experts = TritonBatchedExperts(weights_of(3, torch.float32, device))
        experts(batched([0, 1, 0], torch.float32, device), True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda")
    weights = weights_of(3, torch.bfloat16, device)
    rows = standard(IDS["other ranks"], torch.bfloat16, device)
    by_expert = batched(COUNTS["several sizes"], torch.bfloat16, device)
    calls = (
        (TritonExperts(weights), rows, True),
        (TorchGroupedExperts(weights), rows, True),
        (TritonBatchedExperts(weights), by_expert, False),
    )
    for experts, dispatched, apply_weights in calls:
        # The first call compiles.
        experts(dispatched, apply_weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(dispatched, apply_weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_read_on_the_host(device: torch.device) -> None:
    """So that a CUDA graph may hold them, as they declare; and the others declare otherwise."""
    weights = weights_of(3, torch.float32, device)
    rows = standard(IDS["blocks of several sizes"], torch.float32, device)
    blocks = batched(COUNTS["several sizes"], torch.float32, device)
    made: list[tuple[Experts, Dispatched]] = [
        (TritonExperts(weights), rows),
        (TorchGroupedExperts(weights), rows),
        (TritonBatchedExperts(weights), blocks),
    ]
    for experts, dispatched in made:
        assert not experts.reads_on_host
        with no_host_reads():
            experts(dispatched, False)
    made = [(TorchExperts(weights), rows), (TorchBatchedExperts(weights), blocks)]
    for experts, dispatched in made:
        assert experts.reads_on_host
        with no_host_reads(), pytest.raises(HostRead):
            experts(dispatched, False)
