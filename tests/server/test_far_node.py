"""What the first node's launcher orders another one, and what it makes of its reports."""

from typing import Any

import msgspec
import pytest

from moed.server.far_node import FRESH_S, FarNode
from moed.server.node_messages import (
    MAX_TEXT_CHARACTERS,
    FromNode,
    NodeOrder,
    NodeReport,
    RankReport,
    ToNode,
    shortened,
)


class Bench:
    """Node 1 with ranks 2 and 3, and the orders that it was sent."""

    def __init__(self) -> None:
        self.orders: list[NodeOrder] = []
        self.node = FarNode(1, [2, 3], self.orders.append)

    @property
    def last(self) -> NodeOrder:
        return self.orders[-1]

    def report(
        self,
        *ranks: RankReport,
        order: int | None = None,
        epoch: int = 0,
        launcher: str = "one",
    ) -> None:
        number = (self.last.number if self.orders else 0) if order is None else order
        self.node.on_report(
            NodeReport(
                node=1,
                name="second",
                launcher=launcher,
                epoch=epoch,
                order=number,
                ranks=list(ranks),
            )
        )


def rank(number: int = 0, **more: Any) -> RankReport:
    return RankReport(number=number, pid=40 + number, **more)


def test_a_lost_rank_is_told_of_with_its_words_and_its_node() -> None:
    bench = Bench()
    lost, well = bench.node.ranks
    assert (lost.exit_code, lost.failure) == (None, None)
    bench.report(rank(exit_code=-9), rank())
    assert (lost.exit_code, well.exit_code) == (-9, None)
    expected = "rank 2 on node 1, second ended without a word: killed by SIGKILL"
    assert lost.report() == expected
    bench.report(rank(), rank(exit_code=65, error="no such file", error_code=65))
    assert well.report() == "rank 3 on node 1, second failed: no such file"
    assert well.failure is not None and well.failure.exit_code == 65
    assert bench.orders == []


def test_another_process_is_ordered_and_what_the_old_one_was_does_not_count() -> None:
    bench = Bench()
    lost, well = bench.node.ranks
    bench.report(rank(exit_code=-9), rank(door=-1))
    bench.node.form_anew(1, [lost], 0)
    assert (bench.last.epoch, bench.last.rank_numbers, bench.last.store_port) == (1, [1, 0], 0)
    # Said before the order came.
    bench.report(rank(exit_code=-9), rank(lost_epoch=0, lost_error="a peer left"), order=0)
    assert lost.exit_code is None and not lost.has_come_up
    assert well.peer_gone is not None and well.peer_gone.epoch == 0
    bench.report(rank(1, door=1, has_come_up=True), rank(door=1), epoch=1)
    assert [lost.door, well.door] == [1, 1]
    bench.node.let_in(4711)
    assert (bench.last.store_port, bench.last.epoch) == (4711, 1)


def test_an_order_that_was_not_heard_is_sent_again_and_others_are_not() -> None:
    bench = Bench()
    bench.node.tell_trouble("the ranks recover")
    bench.node.tell_trouble("the ranks recover")
    assert len(bench.orders) == 1
    bench.report(rank(), rank(), order=0)
    assert bench.orders[1] == bench.orders[0]
    bench.report(rank(), rank(), order=1)
    assert len(bench.orders) == 2


def test_a_rank_that_is_ended_from_here_counts_as_ended_until_it_is_replaced() -> None:
    bench = Bench()
    slow, _ = bench.node.ranks
    bench.report(rank(is_stopped=True), rank())
    assert slow.is_stopped and slow.name == "rank 2 (process 40 on node 1, second)"
    slow.end(f"{slow.name} keeps the others waiting")
    assert slow.exit_code == -9
    assert slow.report().endswith("keeps the others waiting, and was ended")
    bench.node.replace(slow)
    assert slow.exit_code is None and bench.last.rank_numbers == [1, 0]


def test_beats_are_known_while_reports_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("moed.server.far_node.time.monotonic", lambda: now)
    bench = Bench()
    assert bench.node.beats is None
    bench.report(rank(still_s=2.5, num_entered=7, is_inside=True, step_id=4), rank())
    beats = bench.node.beats
    assert beats is not None
    assert (beats[0].since, beats[0].num_entered, beats[0].is_inside) == (97.5, 7, True)
    assert beats[1].since == 0.0
    now += FRESH_S + 0.1
    assert bench.node.beats is None


def test_stacks_are_asked_for_once_for_each_stall() -> None:
    bench = Bench()
    bench.node.ask_for_stacks(3)
    assert bench.last.stacks_of == [1]
    bench.node.form_anew(1, [], 0)
    assert bench.last.stacks_of == []
    bench.node.ask_for_stacks(None)
    assert bench.last.stacks_of == [0, 1]


def test_with_another_launcher_all_ranks_of_the_node_are_lost_once() -> None:
    bench = Bench()
    bench.node.tell_trouble("the ranks recover")
    bench.report(rank(), rank())
    nobody = rank(exit_code=-9)
    bench.report(nobody, nobody, launcher="two", order=0)
    assert all(one.exit_code == -9 for one in bench.node.ranks)
    assert (
        "rank 3 on node 1, second failed: the launcher of its node" in bench.node.ranks[1].report()
    )
    # It has to hear of nothing but the group that comes next.
    assert len(bench.orders) == 1
    bench.node.form_anew(1, bench.node.ranks, 0)
    bench.report(rank(1), rank(1), launcher="two", epoch=1)
    assert [one.exit_code for one in bench.node.ranks] == [None, None]


@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_a_report_of_another_number_of_ranks_changes_nothing(num_ranks: int) -> None:
    bench = Bench()
    bench.report(*[rank(exit_code=-9)] * num_ranks)
    assert [one.exit_code for one in bench.node.ranks] == [None, None]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x" * (MAX_TEXT_CHARACTERS + 1)},
        {"ranks": [{"number": 0, "pid": 1}] * 5000},
        {"ranks": [{"number": -1, "pid": 1}]},
        {"ranks": [{"number": 0, "pid": 1, "error": "x" * (MAX_TEXT_CHARACTERS + 1)}]},
        {"epoch": -1},
        {"epoch": "1"},
    ],
)
def test_a_report_beyond_its_bounds_is_no_message(changes: dict[str, Any]) -> None:
    good = {"type": "node_report", "node": 1, "name": "b", "launcher": "one", "epoch": 0}
    good |= {"order": 0, "ranks": []}
    decoder = msgspec.msgpack.Decoder(FromNode)
    assert isinstance(decoder.decode(msgspec.msgpack.encode(good)), NodeReport)
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode({**good, **changes}))


def test_what_is_sent_is_within_the_bounds() -> None:
    bench = Bench()
    bench.node.tell_trouble("x" * 10 * MAX_TEXT_CHARACTERS)
    data = msgspec.msgpack.encode(bench.last)
    assert msgspec.msgpack.Decoder(ToNode).decode(data) == bench.last
    assert len(shortened("x" * 10 * MAX_TEXT_CHARACTERS)) == MAX_TEXT_CHARACTERS
