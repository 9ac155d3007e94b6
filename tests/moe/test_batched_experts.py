"""Batched experts equal an obvious reference, and touch no row beyond the counts."""

import pytest
import torch

from moed.config.capabilities import ActivationFormat
from moed.dist.all2all.base import Dispatched
from moed.moe.experts import (
    ExpertWeights,
    TorchBatchedExperts,
    make_experts,
    reference_batched_experts,
    reference_experts,
)
from moed.moe.linear import Linear

HIDDEN, SIZE, CAPACITY = 16, 24, 9


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights_of(num_experts: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    generator = torch.Generator().manual_seed(num_experts)
    gate_up = torch.randn(num_experts, 2 * SIZE, HIDDEN, generator=generator) / 4
    down = torch.randn(num_experts, HIDDEN, SIZE, generator=generator) / 4
    return ExpertWeights.plain(gate_up.to(dtype), down.to(dtype))


def rows_of(
    counts: list[int], dtype: torch.dtype = torch.float32, capacity: int = CAPACITY
) -> Dispatched:
    """NaN in all rows beyond the counts."""
    generator = torch.Generator().manual_seed(sum(counts))
    hidden = torch.full((len(counts), capacity, HIDDEN), torch.nan, dtype=dtype)
    for expert, count in enumerate(counts):
        hidden[expert, :count] = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    return Dispatched(hidden, None, None, torch.tensor(counts, dtype=torch.int32), None)


def used(tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([tensor[expert, :count] for expert, count in enumerate(counts)])


COUNTS = [[0, 0, 0], [1, 0, 0], [0, 0, 1], [3, 0, 9], [9, 9, 9], [2, 5, 1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=str
)
def test_equals_the_reference(dtype: torch.dtype, tolerance: float, counts: list[int]) -> None:
    weights, dispatched = weights_of(3, dtype), rows_of(counts, dtype)
    experts = TorchBatchedExperts(weights)
    found = experts(dispatched, False)
    assert found.dtype == dtype and found.shape == dispatched.hidden.shape
    expected = reference_batched_experts(dispatched, weights.gate_up.values, weights.down.values)
    torch.testing.assert_close(
        used(found, counts).float(), used(expected, counts), rtol=tolerance, atol=tolerance
    )
    assert experts.rows_per_slot.tolist() == counts


def test_both_references_agree() -> None:
    """Each row is in the standard format a row with one choice, not weighted."""
    weights, counts = weights_of(3), [2, 0, 4]
    dispatched = rows_of(counts)
    ids = torch.tensor([0, 0, 2, 2, 2, 2])[:, None]
    flat = Dispatched(used(dispatched.hidden, counts), ids, torch.zeros(6, 1), None, None)
    torch.testing.assert_close(
        used(
            reference_batched_experts(dispatched, weights.gate_up.values, weights.down.values),
            counts,
        ),
        reference_experts(flat, weights.gate_up.values, weights.down.values, False),
    )


def test_no_experts() -> None:
    assert TorchBatchedExperts(weights_of(0))(rows_of([]), False).shape == (0, CAPACITY, HIDDEN)


def test_rows_beyond_the_counts_are_neither_read_nor_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, mark = [3, 0, 9], -7.0
    dispatched = rows_of(counts)
    before = dispatched.hidden.clone()
    # The output as the allocator may return it.
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real(*a, **k).fill_(mark))
    found = TorchBatchedExperts(weights_of(3))(dispatched, False)
    for expert, count in enumerate(counts):
        assert found[expert, :count].isfinite().all()
        assert torch.all(found[expert, count:] == mark)
    torch.testing.assert_close(dispatched.hidden, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_cost_follows_the_counts(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """Two matrix products per expert that has rows, each over those rows alone."""
    rows: list[int] = []
    real = Linear.__call__

    def counted(linear: Linear, inputs: torch.Tensor) -> torch.Tensor:
        rows.append(inputs.shape[0])
        return real(linear, inputs)

    monkeypatch.setattr(Linear, "__call__", counted)
    TorchBatchedExperts(weights_of(3))(rows_of(counts, capacity=500), False)
    once = [count for count in counts if count]
    assert rows == once + once


def test_rows_may_lie_apart() -> None:
    """A buffer whose rows are longer than a row, as a transport may hand it over."""
    counts, weights = [3, 0, 9], weights_of(3)
    dispatched = rows_of(counts)
    wide = torch.full((3, CAPACITY, HIDDEN + 8), torch.nan)
    wide[..., :HIDDEN] = dispatched.hidden
    padded = Dispatched(wide[..., :HIDDEN], None, None, dispatched.num_rows_per_expert, None)
    experts = TorchBatchedExperts(weights)
    torch.testing.assert_close(
        used(experts(padded, False), counts), used(experts(dispatched, False), counts)
    )


def test_router_weights_are_not_its_business() -> None:
    with pytest.raises(AssertionError, match="combine applies"):
        TorchBatchedExperts(weights_of(3))(rows_of([1, 0, 0]), True)


def test_it_serves_the_batched_format_on_a_cpu() -> None:
    experts = make_experts(ActivationFormat.BATCHED, "cpu", weights_of(2))
    assert isinstance(experts, TorchBatchedExperts)
