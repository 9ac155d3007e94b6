"""What follows from the records of a step, and that all ranks gather the same ones."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from moed.config.errors import PeerLost, RankMismatch
from moed.config.graphs import EAGER, GraphShape
from moed.dist.agreement import (
    Agreed,
    Agreement,
    Decision,
    DecisionKind,
    RankState,
    StepRecord,
    decide,
    gather_ints,
)
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from tests.dist.counting import counted_collectives
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool

IDLE, WORKING, DRAINING, STOPPING, FAILED = RankState
RUN, SLEEP, STOP = DecisionKind


def record(
    state: RankState,
    num_tokens: int = 0,
    wake_number: int = 4,
    graph: GraphShape = EAGER,
    step_id: int = 9,
    has_prompts: bool = False,
    config_digest: int = 77,
) -> StepRecord:
    return StepRecord(step_id, num_tokens, state, wake_number, graph, has_prompts, config_digest)


def test_record_survives_the_wire() -> None:
    original = StepRecord(2**40, 2048, DRAINING, 3, GraphShape(256, 64), True, 2**63 - 1)
    assert original.to_ints() == [2**40, 2048, 2, 3, 256, 64, 1, 2**63 - 1]
    assert StepRecord.from_ints(original.to_ints()) == original


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        # All idle, same wake number: sleep, also alone.
        ([record(IDLE)], SLEEP),
        ([record(IDLE), record(IDLE), record(IDLE)], SLEEP),
        # One has seen a wake that the others have not: they must meet it awake.
        ([record(IDLE), record(IDLE, wake_number=5)], RUN),
        ([record(IDLE, wake_number=5), record(IDLE), record(IDLE)], RUN),
        # One has work, or requests that could not be scheduled in this step.
        ([record(IDLE), record(WORKING, num_tokens=1)], RUN),
        ([record(IDLE), record(WORKING, num_tokens=0)], RUN),
        ([record(WORKING, num_tokens=16), record(WORKING, num_tokens=16)], RUN),
        ([record(IDLE, num_tokens=3), record(IDLE)], RUN),
        # Draining ranks are to be stopped soon; nobody sleeps on that.
        ([record(DRAINING), record(IDLE)], RUN),
        ([record(DRAINING), record(DRAINING)], RUN),
        # Stop together or not at all, whatever the wake numbers.
        ([record(STOPPING)], STOP),
        ([record(STOPPING, wake_number=5), record(STOPPING)], STOP),
        ([record(STOPPING), record(IDLE)], RUN),
        ([record(STOPPING), record(WORKING, num_tokens=1), record(STOPPING)], RUN),
        ([record(STOPPING), record(DRAINING)], RUN),
    ],
)
def test_what_follows(records: list[StepRecord], kind: DecisionKind) -> None:
    for permuted in itertools.permutations(records):
        assert decide(permuted, 1) == Decision(kind)


@pytest.mark.parametrize(
    ("loads", "graph"),
    [
        # (tokens, rows, blocks) of each rank: the most of each holds everyone's.
        ([(3, 4, 64), (7, 8, 64)], GraphShape(8, 64)),
        ([(3, 4, 128), (7, 8, 64)], GraphShape(8, 128)),
        # A rank without tokens replays it with none, whatever it says.
        ([(3, 4, 64), (0, 0, 0)], GraphShape(4, 64)),
        # A rank whose step fits no graph makes all eager.
        ([(3, 4, 64), (9, 0, 0)], EAGER),
        ([(9, 0, 0)], EAGER),
        ([(0, 0, 0), (0, 0, 0)], EAGER),
    ],
)
def test_one_graph_for_all(loads: list[tuple[int, int, int]], graph: GraphShape) -> None:
    records = [record(WORKING, tokens, graph=GraphShape(*own)) for tokens, *own in loads]
    for permuted in itertools.permutations(records):
        assert decide(permuted, 1) == Decision(RUN, graph)


@pytest.mark.parametrize("key", ["step_id", "config_digest"])
def test_a_difference_names_the_key_and_every_rank(key: str) -> None:
    same = record(IDLE)
    other = dataclasses.replace(same, **{key: 12345})  # type: ignore[arg-type]
    with pytest.raises(RankMismatch) as caught:
        decide([same, other, same], 1)
    own = getattr(same, key)
    assert f"differ in {key} (rank 0: {own}, rank 1: 12345, rank 2: {own})" in str(caught.value)
    assert caught.value.exit_code == 78


def test_prompts_of_any_rank_make_the_step_one_of_prompts() -> None:
    for flags in itertools.product((False, True), repeat=2):
        records = tuple(record(WORKING, 1, has_prompts=flag) for flag in flags)
        metadata = DPMetadata(torch.ones(2, dtype=torch.int32), 0, 9)
        assert Agreed(decide(records, 1), metadata, records).has_prompts == any(flags)


def test_a_failed_rank_is_named_and_nobody_goes_on() -> None:
    for others in (IDLE, WORKING, STOPPING):
        with pytest.raises(PeerLost, match="rank 2 has failed"):
            decide([record(others), record(others), record(FAILED), record(others)], 1)
    # A difference explains more than the failure that it has led to.
    with pytest.raises(RankMismatch):
        decide([record(FAILED), record(IDLE, step_id=10)], 1)


# All orders of events -----------------------------------------------------------------------------

Message = tuple[int, int | str]
"""Receiving rank, and the number of a wake, or "work", or "stop"."""


@dataclasses.dataclass(frozen=True)
class ModelRank:
    """The loop's rules and nothing else: a step reads messages, announces, follows the decision."""

    wake_number: int = 0
    num_requests: int = 0
    num_served: int = 0
    is_stopping: bool = False
    has_stopped: bool = False
    announced: StepRecord | None = None
    """Waiting for the others' records in the collective; messages stay unread meanwhile."""
    unread: tuple[int | str, ...] = ()
    sleeps_since: int | None = None
    """The wake number at which it fell asleep; None when awake."""

    @property
    def can_announce(self) -> bool:
        return self.announced is None and self.sleeps_since is None and not self.has_stopped

    def deliver(self, message: int | str) -> "ModelRank":
        if self.announced is not None:
            return dataclasses.replace(self, unread=(*self.unread, message))
        return self._read(message)

    def _read(self, message: int | str) -> "ModelRank":
        if message == "work":
            return dataclasses.replace(self, num_requests=self.num_requests + 1)
        if message == "stop":
            return dataclasses.replace(self, num_requests=0, is_stopping=True)
        assert isinstance(message, int)
        number = max(self.wake_number, message)
        wakes = self.sleeps_since is not None and number > self.sleeps_since
        sleeps_since = None if wakes else self.sleeps_since
        return dataclasses.replace(self, wake_number=number, sleeps_since=sleeps_since)

    def announce(self) -> "ModelRank":
        state = STOPPING if self.is_stopping else WORKING if self.num_requests else IDLE
        own = record(state, min(self.num_requests, 1), self.wake_number)
        return dataclasses.replace(self, announced=own)

    def follow(self, decision: Decision) -> "ModelRank":
        assert self.announced is not None
        rows = self.announced.num_tokens
        rank = dataclasses.replace(
            self,
            announced=None,
            unread=(),
            num_requests=self.num_requests - rows,
            num_served=self.num_served + rows,
            has_stopped=decision.kind is STOP,
            sleeps_since=self.wake_number if decision.kind is SLEEP else None,
        )
        for message in self.unread:
            rank = rank._read(message)
        return rank


@dataclasses.dataclass(frozen=True)
class World:
    """Three ranks, and what is on its way to each of them, in order."""

    ranks: tuple[ModelRank, ...]
    queues: tuple[tuple[int | str, ...], ...]

    def next_worlds(self) -> list["World"]:
        """One for each event that may come next."""
        found = []
        for index, rank in enumerate(self.ranks):
            if queue := self.queues[index]:
                found.append(self._with(index, rank.deliver(queue[0]), queue[1:]))
            if rank.can_announce:
                found.append(self._with(index, rank.announce(), queue))
        records = [rank.announced for rank in self.ranks if rank.announced is not None]
        if len(records) == len(self.ranks):
            decision = decide(records, 1)
            ranks = tuple(rank.follow(decision) for rank in self.ranks)
            found.append(World(ranks, self.queues))
        return found

    def _with(self, index: int, rank: ModelRank, queue: tuple[int | str, ...]) -> "World":
        before, after = slice(index), slice(index + 1, None)
        return World(
            (*self.ranks[before], rank, *self.ranks[after]),
            (*self.queues[before], queue, *self.queues[after]),
        )


def explore(start: World) -> dict[World, list[World]]:
    """Every world that can come about, with those that may follow it."""
    followers: dict[World, list[World]] = {}
    to_visit = [start]
    while to_visit:
        world = to_visit.pop()
        if world not in followers:
            followers[world] = world.next_worlds()
            to_visit.extend(followers[world])
    return followers


def leads_to(followers: dict[World, list[World]], ends: set[World]) -> set[World]:
    """The worlds from which one of `ends` can still come about."""
    leaders: dict[World, list[World]] = {world: [] for world in followers}
    for world, following in followers.items():
        for follower in following:
            leaders[follower].append(world)
    found, to_visit = set(ends), list(ends)
    while to_visit:
        for leader in leaders[to_visit.pop()]:
            if leader not in found:
                found.add(leader)
                to_visit.append(leader)
    return found


def wake(number: int) -> list[Message]:
    return [(rank, number) for rank in range(3)]


AWAKE, ASLEEP = ModelRank(), ModelRank(sleeps_since=0)
ONE_REQUEST: list[Message] = [(1, "work"), *wake(1)]
TWO_RANKS: list[Message] = [*ONE_REQUEST, (2, "work"), *wake(2)]
ONE_RANK_TWICE: list[Message] = [*ONE_REQUEST, (1, "work"), *wake(2)]
BOTH_BEFORE_A_WAKE: list[Message] = [(1, "work"), (2, "work"), *wake(1), *wake(2)]
STOP_AFTER_WORK: list[Message] = [*ONE_REQUEST, (0, "stop"), (1, "stop"), (2, "stop"), *wake(2)]


@pytest.mark.parametrize("rank", [AWAKE, ASLEEP], ids=["awake", "asleep"])
@pytest.mark.parametrize("sent", [ONE_REQUEST, TWO_RANKS, ONE_RANK_TWICE, BOTH_BEFORE_A_WAKE])
def test_in_every_order_of_events_all_is_served_and_all_sleep(
    sent: list[Message], rank: ModelRank
) -> None:
    """Whoever hears of what first, and whoever comes first to a step: nothing is forgotten, and no
    rank waits in a step that another one sleeps through. The order to one rank is kept.
    """
    queues = tuple(tuple(what for to, what in sent if to == index) for index in range(3))
    followers = explore(World((rank,) * 3, queues))
    ends = {world for world, following in followers.items() if not following}
    for world in ends:
        assert not any(world.queues)
        for index, end in enumerate(world.ranks):
            assert end.announced is None, "waits alone in a step"
            assert end.sleeps_since == end.wake_number == sent[-1][1]
            assert (end.num_requests, end.num_served) == (0, sent.count((index, "work")))
    # The group cannot be caught in steps that never end, either.
    assert leads_to(followers, ends) == set(followers)


@pytest.mark.parametrize("rank", [AWAKE, ASLEEP], ids=["awake", "asleep"])
def test_in_every_order_of_events_all_stop_together(rank: ModelRank) -> None:
    queues = tuple(tuple(what for to, what in STOP_AFTER_WORK if to == index) for index in range(3))
    followers = explore(World((rank,) * 3, queues))
    # A stopped rank may still be sent a wake; what counts is that all have left.
    ends = {world for world, following in followers.items() if not following}
    assert all(end.has_stopped for world in ends for end in world.ranks)
    assert leads_to(followers, ends) == set(followers)
    for world in followers:
        assert len({end.has_stopped for end in world.ranks}) == 1


# Real ranks ---------------------------------------------------------------------------------------


def agree_on_loads(groups: Groups, digests: list[int], steps: list[list[int]]) -> list[object]:
    """On each rank: one agreement for each entry of `steps`, the tokens of all ranks."""
    rank, parallel = groups.rank, engine_config(ranks=groups.world_size).parallel
    agreement = Agreement(groups, parallel, digests[rank])
    seen: list[object] = []
    for step_id, tokens in enumerate(steps):
        state = WORKING if tokens[rank] else IDLE
        try:
            agreed = agreement.agree(step_id, tokens[rank], state, 1)
        except RankMismatch as error:
            return [str(error)]
        metadata = agreed.dp_metadata
        assert (metadata.rank, metadata.step_id) == (rank, step_id)
        assert [entry.num_tokens for entry in agreed.records] == tokens
        seen.append((agreed.decision.kind, metadata.local_sizes))
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_same_sizes_and_decision(
    workers: Callable[[int], WorkerPool], world_size: int
) -> None:
    steps = [[3, 0, 5], [0, 16, 0], [1, 1, 1], [0, 0, 0]]
    steps = [tokens[:world_size] for tokens in steps]
    seen = workers(world_size).run(agree_on_loads, [7] * world_size, steps)
    expected = [(RUN if any(tokens) else SLEEP, tokens) for tokens in steps]
    assert seen == [expected] * world_size


def count_collectives(groups: Groups) -> list[int]:
    agreement = Agreement(groups, engine_config(ranks=groups.world_size).parallel, 1)
    counts = []
    for step_id, state in enumerate([IDLE, WORKING, DRAINING, STOPPING]):
        with counted_collectives() as calls:
            agreement.agree(step_id, 3 if state is WORKING else 0, state, 0)
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize(("world_size", "count"), [(1, 0), (2, 1), (3, 1)])
def test_an_agreement_is_one_collective(
    workers: Callable[[int], WorkerPool], world_size: int, count: int
) -> None:
    assert workers(world_size).run(count_collectives) == [[count] * 4] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_differing_digest_is_seen_on_every_rank(
    workers: Callable[[int], WorkerPool], world_size: int
) -> None:
    digests = [2**62, 2**62, 5][-world_size:]
    seen = workers(world_size).run(agree_on_loads, digests, [[0] * world_size])
    assert len({message for (message,) in seen}) == 1
    assert f"config_digest (rank 0: {2**62}" in seen[0][0]
    assert f"rank {world_size - 1}: 5)" in seen[0][0]


def announce_other_steps(groups: Groups) -> str:
    agreement = Agreement(groups, engine_config(ranks=groups.world_size).parallel, 1)
    try:
        agreement.agree(10 + groups.rank, 0, IDLE, 0)
    except RankMismatch as error:
        return str(error)
    return "no error"


def test_a_rank_in_another_step_is_seen_on_every_rank(
    workers: Callable[[int], WorkerPool],
) -> None:
    for message in workers(2).run(announce_other_steps):
        assert "step_id (rank 0: 10, rank 1: 11)" in message


def announce_a_failure(groups: Groups) -> str:
    agreement = Agreement(groups, engine_config(ranks=groups.world_size).parallel, 1)
    try:
        agreement.agree(0, 0, FAILED if groups.rank == 1 else WORKING, 0)
    except PeerLost as error:
        return str(error)
    return "no error"


def test_a_failed_rank_is_seen_on_every_rank(workers: Callable[[int], WorkerPool]) -> None:
    for message in workers(3).run(announce_a_failure):
        assert "rank 1 has failed; its own error says why" in message


def gather(groups: Groups, ints: list[int]) -> list[int]:
    return gather_ints(groups, ints[groups.rank])


@pytest.mark.parametrize("ints", [[5], [-1, 2**62], [3, 2, 1]])
def test_numbers_are_gathered_by_rank(
    workers: Callable[[int], WorkerPool], ints: list[int]
) -> None:
    assert workers(len(ints)).run(gather, ints) == [ints] * len(ints)
