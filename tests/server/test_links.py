"""What the front end makes of other nodes' silence, and a keeper of the front end's."""

import asyncio

import pytest

from moed.config.errors import PeerLost
from moed.server.health import Health, Phase
from moed.server.links import SILENT_S, Links
from moed.server.messages import FromEngine, RankProgress
from moed.server.node_messages import Beat, NodeBeat, NodeOrder, NodeReport, Over, ToNode

LOST_S = 20.0
BEAT = NodeBeat(node=1, name="second", ranks=[2, 3])


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[tuple[int, ToNode]] = []
        self.received: list[FromEngine] = []

    def send_to_node(self, node: int, message: ToNode) -> None:
        self.sent.append((node, message))

    async def receive(self) -> FromEngine:
        return self.received.pop(0)


class Watched:
    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.health = Health(num_ranks=4)
        self.num_stops = 0
        self.reports: list[NodeReport] = []
        self.links = Links(
            self.channel,  # type: ignore[arg-type]
            self.health,
            self._stop,
            self.reports.append,
            LOST_S,
        )
        self.health.phase = Phase.READY

    def _stop(self) -> None:
        self.num_stops += 1


def test_a_beat_is_answered_and_silence_turns_readiness_red() -> None:
    watched = Watched()
    watched.links.look(1000.0)
    watched.links.on_beat(BEAT, 1000.0)
    assert watched.channel.sent == [(1, Beat())]
    watched.links.look(1000.0 + SILENT_S)
    assert watched.health.is_ready
    watched.links.look(1000.5 + SILENT_S)
    assert not watched.health.is_ready
    assert watched.health.silence == "node 1 (second, ranks 2, 3) has been silent for 6 s"
    watched.links.on_beat(BEAT, 1007.0)
    watched.links.look(1007.5)
    assert watched.health.is_ready


def test_a_node_that_stays_silent_is_lost() -> None:
    watched = Watched()
    watched.links.on_beat(BEAT, 0.0)
    watched.links.on_beat(NodeBeat(node=2, name="third", ranks=[4]), 15.0)
    watched.links.look(LOST_S)
    with pytest.raises(PeerLost, match=r"node 1 \(second, ranks 2, 3\) has been silent for 20 s"):
        watched.links.look(LOST_S + 0.5)


def test_a_node_that_stops_stops_all_once_and_is_not_lost_by_its_silence() -> None:
    watched = Watched()
    for now in (0.0, 1.0):
        watched.links.on_beat(NodeBeat(node=1, name="second", ranks=[2], is_stopping=True), now)
    assert watched.num_stops == 1
    watched.links.look(10 * LOST_S)


def test_reports_are_for_the_launcher_alone() -> None:
    watched = Watched()
    report = NodeReport(node=1, name="second", launcher="one", epoch=0, order=0, ranks=[])
    progress = RankProgress(2, "loading")
    watched.channel.received = [BEAT, report, progress]
    assert asyncio.run(watched.links.receive()) == progress
    assert watched.reports == [report]
    assert watched.channel.sent == [(1, Beat())]


def test_orders_go_to_nodes_that_have_been_heard() -> None:
    watched = Watched()
    order = NodeOrder(node=1, number=1, epoch=1, rank_numbers=[0, 1])
    watched.links.order(order)
    assert watched.channel.sent == []
    watched.links.on_beat(BEAT, 0.0)
    watched.links.order(order)
    assert watched.channel.sent[1:] == [(1, order)]


def test_the_end_is_told_once_and_first_why() -> None:
    watched = Watched()
    watched.links.on_beat(BEAT, 0.0)
    watched.links.end_all("a rank failed")
    watched.links.end_all("")
    assert watched.channel.sent[1:] == [(1, Over("a rank failed"))]


def test_nodes_that_begin_anew_are_not_missed_meanwhile() -> None:
    watched = Watched()
    watched.links.on_beat(NodeBeat(node=1, name="second", ranks=[2], is_stopping=True), 0.0)
    watched.links.forget()
    watched.links.look(10 * LOST_S)
    assert watched.health.is_ready
    watched.links.on_beat(BEAT, 10 * LOST_S)
    watched.links.on_beat(NodeBeat(node=1, name="second", ranks=[2], is_stopping=True), 300.0)
    assert watched.num_stops == 2


def test_a_drain_ends_with_the_ranks_that_were_to_leave_together() -> None:
    health = Health(num_ranks=1)
    health.on_tokenizer()
    health.on_rank_ready(0)
    health.announce_drain()
    health.stay()
    assert health.is_ready
    health.drain()
    health.stay()
    health.recover(None, "all start again")
    assert health.phase is Phase.RECOVERING and health.holds_requests
    health.on_rank_ready(0)
    assert health.is_ready


def test_what_has_failed_stays_so() -> None:
    health = Health(num_ranks=1)
    health.fail(0, "gone")
    health.stay()
    assert health.phase is Phase.FAILED
