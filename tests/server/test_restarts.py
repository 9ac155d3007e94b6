"""The bound on how often ranks are started again."""

from moed.server.restarts import WINDOW_S, RestartBudget


def test_at_most_so_many_in_any_window() -> None:
    now = 0.0
    budget = RestartBudget(2, lambda: now)
    assert budget.take() and budget.take()
    assert not budget.take() and budget.num_taken == 2
    now = WINDOW_S + 1
    assert budget.take() and budget.num_taken == 1
    now += WINDOW_S - 1
    assert budget.take() and not budget.take()


def test_none_are_none() -> None:
    assert not RestartBudget(0, lambda: 0.0).take()
