"""Which rank holds which expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moed.dist.placement import ExpertPlacement

COUNTS = st.integers(min_value=1, max_value=70)
RANKS = st.integers(min_value=1, max_value=12)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "held"),
    [
        (6, 3, [(0, 1), (2, 3), (4, 5)]),
        # The first ranks hold one more.
        (6, 4, [(0, 1), (2, 3), (4,), (5,)]),
        (7, 3, [(0, 1, 2), (3, 4), (5, 6)]),
        (3, 2, [(0, 1), (2,)]),
        # Fewer experts than ranks.
        (1, 2, [(0,), ()]),
        (2, 4, [(0,), (1,), (), ()]),
        (5, 1, [(0, 1, 2, 3, 4)]),
    ],
)
def test_linear(num_experts: int, num_ranks: int, held: list[tuple[int, ...]]) -> None:
    placement = ExpertPlacement.linear(num_experts, num_ranks)
    assert [placement.local_expert_ids(rank) for rank in range(num_ranks)] == held


def check_consistent(placement: ExpertPlacement) -> None:
    """Every expert lies once, and `rank_of` and `local_of` find it there."""
    num_experts = placement.num_experts
    for tensor in (placement.rank_of, placement.local_of):
        assert tensor.shape == (num_experts,) and tensor.dtype == torch.int64
    held = [placement.local_expert_ids(rank) for rank in range(placement.num_ranks)]
    assert sorted(expert for ids in held for expert in ids) == list(range(num_experts))
    assert [len(ids) for ids in held] == [
        placement.num_local(rank) for rank in range(placement.num_ranks)
    ]
    for expert in range(num_experts):
        rank, local = int(placement.rank_of[expert]), int(placement.local_of[expert])
        assert held[rank][local] == expert


@given(COUNTS, RANKS)
def test_linear_shares_are_even_and_contiguous(num_experts: int, num_ranks: int) -> None:
    placement = ExpertPlacement.linear(num_experts, num_ranks)
    check_consistent(placement)
    counts = [placement.num_local(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert list(placement.ranks) == sorted(placement.ranks)


@given(
    RANKS.flatmap(
        lambda num_ranks: st.tuples(
            st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=40), st.just(num_ranks)
        )
    )
)
def test_any_map_is_consistent(case: tuple[list[int], int]) -> None:
    """Local ids follow global order, however experts are scattered."""
    ranks, num_ranks = case
    placement = ExpertPlacement(tuple(ranks), num_ranks)
    check_consistent(placement)
    for rank in range(num_ranks):
        ids = placement.local_expert_ids(rank)
        assert list(ids) == sorted(ids)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(0, 2), (4, 0), (4, -1), (-3, 2)])
def test_nothing_to_place_is_refused(num_experts: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ExpertPlacement.linear(num_experts, num_ranks)


@pytest.mark.parametrize("ranks", [(0, 2), (-1, 0)])
def test_a_rank_that_does_not_exist_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        ExpertPlacement(ranks, 2)
