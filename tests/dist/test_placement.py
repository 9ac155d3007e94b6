"""Which rank holds which expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moed.config.expert_placement import ExpertPlacement
from moed.dist.placement import SlotMap, local_slots

CPU = torch.device("cpu")
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
    """Every slot of every expert leads to a rank that holds it, under the local slot's number."""
    ids = torch.arange(placement.num_experts)[:, None]
    used: set[int] = set()
    for turn in range(placement.num_ranks):
        slots = SlotMap(placement, turn, CPU).to_slots(ids)
        assert slots.shape == ids.shape and slots.dtype == torch.int64
        used |= set(slots.flatten().tolist())
        for rank in range(placement.num_ranks):
            local = local_slots(slots, placement, rank)
            for expert, slot in enumerate(local.flatten().tolist()):
                held = placement.local_expert_ids(rank)
                assert slot == -1 or held[slot] == expert
        ranks = range(placement.num_ranks)
        found = torch.stack([local_slots(slots, placement, rank) >= 0 for rank in ranks])
        assert (found.sum(dim=0) == 1).all()
    assert max(used) < placement.num_slots


@given(COUNTS, RANKS)
def test_linear_shares_are_even_and_contiguous(num_experts: int, num_ranks: int) -> None:
    placement = ExpertPlacement.linear(num_experts, num_ranks)
    check_consistent(placement)
    counts = [placement.num_local(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert [e for held in placement.held for e in held] == list(range(num_experts))


@given(
    RANKS.flatmap(
        lambda num_ranks: st.lists(
            st.sets(st.integers(0, 9), max_size=10), min_size=num_ranks, max_size=num_ranks
        )
    )
)
def test_any_placement_with_copies_is_consistent(extra: list[set[int]]) -> None:
    """Every expert somewhere, and any further copies."""
    held = [
        sorted(experts | {e for e in range(10) if e % len(extra) == rank})
        for rank, experts in enumerate(extra)
    ]
    check_consistent(ExpertPlacement(tuple(map(tuple, held)), 10))


def test_rows_take_copies_in_turn() -> None:
    # Expert 0 lies in slots 0 (rank 0) and 2 (rank 1), expert 1 in slot 1, expert 2 in slot 3.
    placement = ExpertPlacement(((0, 1), (0, 2)), 3)
    assert placement.slots_of == ((0, 2), (1,), (3,))
    ids = torch.tensor([[0, 1], [0, 2], [-1, 0], [0, -1]])
    assert SlotMap(placement, 0, CPU).to_slots(ids).tolist() == [[0, 1], [2, 3], [-1, 0], [2, -1]]
    assert SlotMap(placement, 1, CPU).to_slots(ids).tolist() == [[2, 1], [0, 3], [-1, 2], [0, -1]]


def test_sharded_experts_are_everywhere() -> None:
    placement = ExpertPlacement.sharded(5, 3)
    ids = torch.tensor([[0, 4], [-1, 2]])
    slots = SlotMap(placement, 2, CPU).to_slots(ids)
    assert (placement.num_slots, placement.num_local_slots) == (5, 5)
    for rank in range(3):
        assert torch.equal(local_slots(slots, placement, rank), ids)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(0, 2), (4, 0), (4, -1), (-3, 2)])
def test_nothing_to_place_is_refused(num_experts: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ExpertPlacement.linear(num_experts, num_ranks)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0, 1], [2]], "no rank holds expert 3"),
        ([[0, 1], [2, 3, 4]], r"rank 1 holds expert 4: they are 0\.\.3"),
        ([[0, 1, -1], [2, 3]], "rank 0 holds expert -1"),
        ([[0, 1, 1], [2, 3]], "rank 0 holds an expert twice"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(held: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(tuple(map(tuple, held)), 4)
