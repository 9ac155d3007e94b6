"""Placing experts by their load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moed.config.expert_placement import ExpertPlacement
from moed.dist.balance import balance, imbalance


def test_without_copies_the_busiest_are_spread() -> None:
    # 9, then 8, 3, 2 to the rank with less: 9 + 2 and 8 + 3.
    assert balance([9, 8, 3, 2], 2, 0).held == ((0, 3), (1, 2))


def test_copies_go_to_the_busiest() -> None:
    # Six slots for four experts: the first copy halves expert 0 to 15, the second goes to it again
    # were there a third rank; with two, to expert 1.
    placement = balance([30, 10, 5, 5], 2, 2)
    assert [len(slots) for slots in placement.slots_of] == [2, 2, 1, 1]
    assert imbalance([30, 10, 5, 5], placement) == 1.0
    # Linear: 40 of 50 on the first of two.
    assert imbalance([30, 10, 5, 5], ExpertPlacement.linear(4, 2)) == 1.6


def test_no_rows_at_all() -> None:
    assert imbalance([0, 0], balance([0, 0], 2, 0)) == 1.0


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=24),
    st.integers(1, 8),
    st.integers(0, 40),
)
def test_any_load_gives_a_legal_placement(rows: list[int], num_ranks: int, copies: int) -> None:
    """`ExpertPlacement` itself refuses experts that are missing, or twice on a rank."""
    num_slots = -(-(len(rows) + copies) // num_ranks)
    if num_slots > len(rows):
        with pytest.raises(ValueError, match="more than"):
            balance(rows, num_ranks, copies)
        return
    placement = balance(rows, num_ranks, copies)
    assert placement.num_ranks == num_ranks and placement.num_local_slots <= num_slots
    filled = sum(map(len, placement.held))
    assert filled == (num_slots * num_ranks if copies else len(rows))


def test_a_skewed_load_is_evened_out() -> None:
    """Zipf over 64 experts and 8 ranks; no rank can have less than its share of the busiest."""
    rows = [10_000 // (expert + 1) for expert in range(64)]
    assert imbalance(rows, ExpertPlacement.linear(64, 8)) > 3
    assert imbalance(rows, balance(rows, 8, 16)) < 1.05


@pytest.mark.parametrize(("num_ranks", "copies"), [(0, 0), (2, -1)])
def test_impossible_sizes(num_ranks: int, copies: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        balance([1, 2], num_ranks, copies)
