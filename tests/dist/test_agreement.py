"""What follows from the records of a step, and that all ranks gather the same ones."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest

from moed.config.errors import PeerLost, RankMismatch
from moed.dist.agreement import (
    Agreement,
    Decision,
    DecisionKind,
    RankState,
    StepRecord,
    compare_at_start,
    decide,
    gather_ints,
    gather_texts,
)
from moed.dist.groups import Groups
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool

IDLE, WORKING, DRAINING, STOPPING, FAILED = RankState
RUN, SLEEP, STOP = DecisionKind


def record(
    state: RankState,
    num_tokens: int = 0,
    wake_number: int = 4,
    graph_bucket: int = 0,
    step_id: int = 9,
    config_digest: int = 77,
) -> StepRecord:
    return StepRecord(step_id, num_tokens, state, wake_number, graph_bucket, config_digest)


def test_record_survives_the_wire() -> None:
    original = StepRecord(2**40, 2048, DRAINING, 3, 256, 2**63 - 1)
    assert original.to_ints() == [2**40, 2048, 2, 3, 256, 2**63 - 1]
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
        assert decide(permuted) == Decision(kind)


@pytest.mark.parametrize(
    ("loads", "bucket"),
    [
        # (rows, bucket) of each rank: the largest bucket holds everyone's rows.
        ([(3, 4), (7, 8)], 8),
        ([(3, 4), (0, 0)], 4),  # a rank without rows replays it with none
        ([(3, 4), (9, 0)], 0),  # a rank whose rows fit no graph makes all eager
        ([(9, 0)], 0),
        ([(0, 0), (0, 0)], 0),
    ],
)
def test_one_graph_bucket_for_all(loads: list[tuple[int, int]], bucket: int) -> None:
    records = [record(WORKING, rows, graph_bucket=own) for rows, own in loads]
    for permuted in itertools.permutations(records):
        assert decide(permuted) == Decision(RUN, bucket)


@pytest.mark.parametrize("key", ["step_id", "config_digest"])
def test_a_difference_names_the_key_and_every_rank(key: str) -> None:
    same = record(IDLE)
    other = dataclasses.replace(same, **{key: 12345})  # type: ignore[arg-type]
    with pytest.raises(RankMismatch) as caught:
        decide([same, other, same])
    own = getattr(same, key)
    assert f"differ in {key} (rank 0: {own}, rank 1: 12345, rank 2: {own})" in str(caught.value)
    assert caught.value.exit_code == 78


def test_a_failed_rank_is_named_and_nobody_goes_on() -> None:
    for others in (IDLE, WORKING, STOPPING):
        with pytest.raises(PeerLost, match="rank 2 has failed"):
            decide([record(others), record(others), record(FAILED), record(others)])
    # A difference explains more than the failure that it has led to.
    with pytest.raises(RankMismatch):
        decide([record(FAILED), record(IDLE, step_id=10)])


# All delivery orders ------------------------------------------------------------------------------


class ModelRank:
    """The loop's rules and nothing else: one that has a request runs one step for it."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.wake_number = 0
        self.num_requests = 0
        self.num_served = 0
        self.num_agreements = 0
        self.sleeps_since: int | None = None
        """The wake number at which it fell asleep; None when awake."""

    def deliver(self, message: int | str) -> None:
        if isinstance(message, str):
            self.num_requests += 1
        else:
            self.wake_number = max(self.wake_number, message)
        if self.sleeps_since is not None and self.wake_number > self.sleeps_since:
            self.sleeps_since = None

    def record(self) -> StepRecord:
        has_work = self.num_requests > 0
        state = WORKING if has_work else IDLE
        return record(state, int(has_work), self.wake_number, step_id=self.step_id)

    def follow(self, decision: Decision) -> None:
        self.step_id += 1
        self.num_agreements += 1
        if decision.kind is SLEEP:
            # Messages are read between steps only, so the number is the one of the record.
            self.sleeps_since = self.wake_number
        elif self.num_requests:
            self.num_requests -= 1
            self.num_served += 1


def agree_while_possible(ranks: Sequence[ModelRank], most: int) -> int:
    """The group steps only when nobody sleeps: the others wait inside their collective."""
    num_agreements = 0
    while num_agreements < most and all(rank.sleeps_since is None for rank in ranks):
        decision = decide([rank.record() for rank in ranks])
        for rank in ranks:
            rank.follow(decision)
        num_agreements += 1
    return num_agreements


Message = tuple[int, int | str]
"""Receiving rank, and the number of a wake or the name of a request."""


def interleavings(queues: tuple[tuple[Message, ...], ...]) -> set[tuple[Message, ...]]:
    """All orders of delivery that keep the order of each queue."""
    if not any(queues):
        return {()}
    found = set()
    for index, queue in enumerate(queues):
        if queue:
            rest = (*queues[:index], queue[1:], *queues[index + 1 :])
            found |= {(queue[0], *order) for order in interleavings(rest)}
    return found


def queues_of(sent: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """One queue to each of three ranks, as the channel keeps the order to one receiver."""
    return tuple(tuple(message for message in sent if message[0] == rank) for rank in range(3))


ONE_REQUEST: list[Message] = [(1, "a"), (0, 1), (1, 1), (2, 1)]
TWO_REQUESTS: list[Message] = [*ONE_REQUEST, (2, "b"), (0, 2), (1, 2), (2, 2)]
SAME_RANK_TWICE: list[Message] = [*ONE_REQUEST, (1, "b"), (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("starts_asleep", [True, False])
@pytest.mark.parametrize("steps_between", [0, 1, 5])
@pytest.mark.parametrize("sent", [ONE_REQUEST, TWO_REQUESTS, SAME_RANK_TWICE])
def test_every_order_of_delivery_is_served_and_ends_asleep(
    sent: list[Message], steps_between: int, starts_asleep: bool
) -> None:
    """Whatever the order in which three ranks hear of requests and wakes, and however many steps
    fit between two deliveries: no request is forgotten, and no rank is left alone in a step.
    """
    orders = interleavings(queues_of(sent))
    # 4!/2! for one request; (2 + 3 + 3 messages) 8!/(2! 3! 3!) and (2 + 4 + 2) 8!/(2! 4! 2!).
    assert len(orders) == {4: 12, 8: 420 if sent is SAME_RANK_TWICE else 560}[len(sent)]
    for order in orders:
        ranks = [ModelRank(step_id=5) for _ in range(3)]
        if starts_asleep:
            assert agree_while_possible(ranks, 5) == 1
        for receiver, message in order:
            ranks[receiver].deliver(message)
            agree_while_possible(ranks, steps_between)
        # Bounded: a group that never came to rest would be seen here.
        assert agree_while_possible(ranks, 20) < 20
        requests = [receiver for receiver, message in order if isinstance(message, str)]
        assert [rank.num_served for rank in ranks] == [requests.count(rank) for rank in range(3)]
        assert [rank.num_requests for rank in ranks] == [0, 0, 0]
        assert len({rank.num_agreements for rank in ranks}) == 1
        # None is awake alone, in a collective that the others do not join.
        assert all(rank.sleeps_since == rank.wake_number == sent[-1][1] for rank in ranks)


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


def compare(groups: Groups, items_by_rank: list[dict[str, str]]) -> str | None:
    try:
        compare_at_start(groups, items_by_rank[groups.rank])
    except RankMismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"block_size": "16"}, "block_size (rank 0: 32, rank 1: 16)"),
        ({"model": "été"}, "model (rank 0: '', rank 1: été)"),
        ({"seed": "0"}, "seed (rank 0: (missing), rank 1: 0)"),
        # Several differ: the first by name.
        ({"model": "x", "block_size": "1"}, "block_size (rank 0: 32, rank 1: 1)"),
    ],
)
def test_settings_are_compared_at_start(
    workers: Callable[[int], WorkerPool], changes: dict[str, str], named: str | None
) -> None:
    items = {"model": "''", "block_size": "32"}
    messages = workers(2).run(compare, [items, items | changes])
    if named is None:
        assert messages == [None, None]
        return
    assert messages[0] == messages[1] and messages[0] is not None
    assert named in messages[0]


def test_nothing_to_compare_is_no_difference(workers: Callable[[int], WorkerPool]) -> None:
    assert workers(2).run(compare, [{}, {}]) == [None, None]
    assert workers(1).run(compare, [{"model": "x"}]) == [None]


def gather(groups: Groups, ints: list[int], texts: list[str]) -> tuple[list[int], list[str]]:
    return gather_ints(groups, ints[groups.rank]), gather_texts(groups, texts[groups.rank])


@pytest.mark.parametrize(
    ("ints", "texts"),
    [
        ([5], ["alone"]),
        ([-1, 2**62], ["short", "x" * 5000]),
        ([0, 0], ["", ""]),
        ([3, 2, 1], ["", "zwölf", "日本語\n\x1e\x1f"]),
    ],
)
def test_numbers_and_texts_are_gathered_by_rank(
    workers: Callable[[int], WorkerPool], ints: list[int], texts: list[str]
) -> None:
    results = workers(len(ints)).run(gather, ints, texts)
    assert results == [(ints, texts)] * len(ints)
