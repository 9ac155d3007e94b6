"""The loop with the real scheduler and the real decisions; model and transport are made up."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moed.config.engine_config import SchedulerConfig
from moed.config.graphs import EAGER, GraphShape
from moed.dist.agreement import Agreed, StepRecord, decide
from moed.dist.all2all.traffic import Traffic
from moed.moe.part_times import PartTimes
from moed.server.block_manager import BlockManager
from moed.server.engine_loop import EngineLoop
from moed.server.expert_reports import ExpertReports
from moed.server.faults import Faults
from moed.server.grammar_masks import GrammarMasks, TokenMasks
from moed.server.messages import (
    AbortRequests,
    FromEngine,
    RankStats,
    Shutdown,
    StepOutputs,
    ToEngine,
    Wake,
)
from moed.server.part_times import PartSamples
from moed.server.scheduler import Schedule, Scheduler
from moed.server.step_plan import StepPlans
from tests.moe.harness import one_rank
from tests.server.engine.configs import engine_config
from tests.server.engine.fakes import (
    VOCAB_SIZE,
    Work,
    expected_output,
    make_request,
    next_token,
)

PATIENCE_S = 20.0
NO_TRAFFIC = Traffic(torch.zeros(1, dtype=torch.int64), 0, 0)


@pytest.fixture(params=[False, True], ids=["plain", "ahead"], autouse=True)
def step_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """All of this in both orders."""
    monkeypatch.setattr(Rank, "step_ahead", request.param)
    return bool(request.param)


class ScriptedChannel:
    """Delivers each message at the n-th time that the engine looks, n given with it."""

    def __init__(self, script: Sequence[tuple[int, ToEngine]]) -> None:
        self.script = list(script)
        self.sent: list[FromEngine] = []
        self.num_looks = 0
        self.num_waits = 0

    def receive(self) -> list[ToEngine]:
        self.num_looks += 1
        due = [message for look, message in self.script if look <= self.num_looks]
        del self.script[: len(due)]
        return due

    def wait(self, timeout_s: float) -> bool:
        assert self.script, "the rank would sleep for ever"
        self.num_waits += 1
        return True

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    @property
    def reports(self) -> list[StepOutputs]:
        return [message for message in self.sent if isinstance(message, StepOutputs)]

    @property
    def stats(self) -> RankStats:
        return self.reports[-1].stats

    def tokens(self, request_id: str) -> list[int]:
        outputs = [o for r in self.reports for o in r.outputs if o.request_id == request_id]
        return [token for output in outputs for token in output.token_ids]


class Table:
    """Where the ranks of one process lay their records: the agreement without a network."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.records: dict[int, StepRecord] = {}
        self.num_ranks = num_ranks


class TableAgreement:
    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank = table, rank
        self.kinds: list[Any] = []

    def agree(
        self,
        step_id: int,
        num_tokens: int,
        state: Any,
        wake_number: int,
        graph: GraphShape,
        has_prompts: bool,
    ) -> Agreed:
        record = StepRecord(step_id, num_tokens, state, wake_number, graph, has_prompts, 7)
        self.table.records[self.rank] = record
        self.table.barrier.wait(PATIENCE_S)
        records = tuple(self.table.records[rank] for rank in range(self.table.num_ranks))
        # Nobody writes the next record before everybody has read these.
        self.table.barrier.wait(PATIENCE_S)
        decision = decide(records, 1)
        self.kinds.append(decision.kind)
        return Agreed(decision, None, records)  # type: ignore[arg-type]


class CountedModel:
    moe_layers = (0,)
    moe_rows = torch.tensor([[3, 0]])


@dataclass
class StepBatch:
    """What the fake runner computes with, as the device has it before the step."""

    num_tokens: int
    prefixes: list[list[int]]
    routed_experts: torch.Tensor | None = None
    times: PartTimes | None = None

    @classmethod
    def of(cls, schedule: Schedule, chosen: torch.Tensor | None) -> "StepBatch":
        tokens = [] if chosen is None else chosen.tolist()
        prefixes = [
            work.tokens[: position + 1]
            for work in (Work.of(scheduled, tokens) for scheduled in schedule.requests)
            for position in work.scheduled.logits_positions
        ]
        return cls(schedule.num_tokens, prefixes)


class FakeRunner:
    """Logits whose maximum is the token that the prefix demands."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def batch(self, schedule: Schedule, chosen: torch.Tensor | None = None) -> StepBatch:
        return StepBatch.of(schedule, chosen)

    def graph_for(self, batch: StepBatch) -> GraphShape:
        return EAGER

    def run(self, batch: StepBatch, dp_metadata: object, graph: GraphShape) -> torch.Tensor:
        self.steps.append(batch.num_tokens)
        rows = torch.zeros(len(batch.prefixes), VOCAB_SIZE)
        for row, prefix in zip(rows, batch.prefixes, strict=True):
            row[next_token(prefix)] = 1.0
        return rows


class Rank:
    """One loop with everything around it."""

    step_ahead = False
    num_blocks = 32
    vocab_size = VOCAB_SIZE

    def __init__(
        self, script: Sequence[tuple[int, ToEngine]], table: Table, rank: int, faults: str | None
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=8,
            max_num_seqs=4,
            max_model_len=64,
            enable_chunked_prefill=True,
            max_num_queued_requests=100,
        )
        self.channel = ScriptedChannel(script)
        self.blocks = BlockManager(self.num_blocks, 4, shares_prefixes=True)
        self.runner = FakeRunner()
        self.agreement = TableAgreement(table, rank)
        self.scheduler = Scheduler(config, self.blocks, 64, self.vocab_size)
        self.loop = EngineLoop(
            rank=rank,
            scheduler=self.scheduler,
            blocks=self.blocks,
            runner=self.runner,  # type: ignore[arg-type]
            plans=StepPlans(one_rank(), torch.device("cpu")),
            agreement=self.agreement,  # type: ignore[arg-type]
            channel=self.channel,
            faults=Faults(faults, rank, 0),
            grammars=GrammarMasks(engine_config().model, num_threads=1),
            expert_reports=ExpertReports(
                rank, CountedModel(), NO_TRAFFIC, range(4), self.channel.send
            ),
            part_samples=PartSamples(torch.device("cpu")),
            first_step_id=1,
            step_ahead=self.step_ahead,
        )


def run(*scripts: Sequence[tuple[int, ToEngine]], faults: str | None = None) -> list[Rank]:
    """One rank per script, in lockstep until they stop together."""
    table = Table(len(scripts))
    ranks = [Rank(script, table, rank, faults) for rank, script in enumerate(scripts)]
    errors: list[BaseException] = []

    def target(rank: Rank) -> None:
        try:
            rank.loop.run()
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=target, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return ranks


def add(request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> ToEngine:
    return make_request(request_id, prompt, max_tokens, **more)


def stop(look: int, wake_number: int) -> list[tuple[int, ToEngine]]:
    return [(look, Shutdown()), (look, Wake(wake_number))]


def test_serves_sleeps_and_stops() -> None:
    (rank,) = run([(3, add("a", [1, 2], 5)), (3, Wake(1)), *stop(20, 2)])
    assert rank.channel.tokens("a") == expected_output([1, 2], 5, [])
    # Steps happen only while there is work, or to leave.
    assert rank.runner.steps == [2, 1, 1, 1, 1]
    assert rank.channel.num_waits > 5
    assert rank.channel.stats.num_running == 0 == rank.channel.stats.num_kv_blocks_used
    assert rank.channel.stats.num_finished == 1
    assert rank.channel.stats.num_steps == 5


def test_a_sleeping_rank_takes_a_request_in_but_moves_only_when_woken() -> None:
    (rank,) = run([(3, add("a", [1], 1)), (4, Wake(0)), (10, Wake(1)), *stop(14, 2)])
    assert rank.channel.tokens("a") == expected_output([1], 1, [])
    # Looks 3 to 10 were all made asleep.
    assert rank.channel.num_waits >= 8


def test_rank_without_work_takes_part_with_zero_rows() -> None:
    first, second = run(
        [(1, add("a", [1, 2, 3], 4)), (1, Wake(1)), *stop(12, 2)], [(1, Wake(1)), *stop(12, 2)]
    )
    assert first.runner.steps == [3, 1, 1, 1] and second.runner.steps == [0, 0, 0, 0]
    assert first.channel.tokens("a") == expected_output([1, 2, 3], 4, [])
    assert second.channel.stats.num_steps == 4
    assert first.agreement.kinds == second.agreement.kinds


LOOKS = [looks for looks in itertools.product((1, 2, 4), repeat=2) if looks[0] <= looks[1]]


@pytest.mark.parametrize("third", LOOKS)
def test_any_order_of_delivery_on_three_ranks(third: tuple[int, int]) -> None:
    """Rank 0 gets work with wake 1, rank 1 with wake 2; each rank hears of both at other times."""
    for first, second in itertools.product(LOOKS, repeat=2):
        ranks = run(
            [(first[0], add("a", [1], 3)), (first[0], Wake(1)), (first[1], Wake(2)), *stop(40, 3)],
            [
                (second[0], Wake(1)),
                (second[1], add("b", [2], 2)),
                (second[1], Wake(2)),
                *stop(40, 3),
            ],
            [(third[0], Wake(1)), (third[1], Wake(2)), *stop(40, 3)],
        )
        assert ranks[0].channel.tokens("a") == expected_output([1], 3, [])
        assert ranks[1].channel.tokens("b") == expected_output([2], 2, [])
        assert len({len(rank.runner.steps) for rank in ranks}) == 1
        assert all(rank.agreement.kinds == ranks[0].agreement.kinds for rank in ranks)


def test_partial_prefill_sends_no_tokens() -> None:
    (rank,) = run([(1, add("a", [1] * 20, 1)), (1, Wake(1)), *stop(10, 2)])
    assert rank.runner.steps[:3] == [8, 8, 4]
    with_outputs = [report for report in rank.channel.reports if report.outputs]
    assert len(with_outputs) == 1 and len(with_outputs[0].outputs[0].token_ids) == 1


def test_bad_request_gets_an_error_and_the_engine_lives() -> None:
    (rank,) = run(
        [
            (1, add("bad", [VOCAB_SIZE], 1)),
            (1, add("empty", [], 1)),
            (1, Wake(1)),
            (5, add("good", [1], 2)),
            (5, Wake(2)),
            *stop(12, 3),
        ]
    )
    errors = {o.request_id: o.error for r in rank.channel.reports for o in r.outputs if o.error}
    assert set(errors) == {"bad", "empty"}
    assert rank.channel.tokens("good") == expected_output([1], 2, [])


def test_abort_frees_within_a_step_and_is_reported(step_ahead: bool) -> None:
    (rank,) = run(
        [
            (1, add("a", [1], 40)),
            (1, add("b", [2], 6)),
            (1, Wake(1)),
            (4, AbortRequests(["a", "unknown"])),
            (9, AbortRequests(["b"])),
            *stop(20, 2),
        ]
    )
    # One step ahead, the last token was still to be taken in.
    assert len(rank.channel.tokens("a")) == 3 - step_ahead
    assert rank.channel.tokens("b") == expected_output([2], 6, [])
    fourth = [report for report in rank.channel.reports if report.stats.num_steps == 4]
    assert fourth[0].stats.num_running == 1 and fourth[0].stats.num_aborted == 1
    assert rank.channel.stats.num_kv_blocks_used == 0
    assert (rank.channel.stats.num_aborted, rank.channel.stats.num_finished) == (1, 1)


def test_abort_of_the_last_request_is_reported_before_sleep() -> None:
    (rank,) = run([(1, add("a", [1], 40)), (1, Wake(1)), (3, AbortRequests(["a"])), *stop(20, 2)])
    assert rank.channel.stats.num_running == 0 and rank.channel.stats.num_aborted == 1


def test_shutdown_drops_requests_and_refuses_new_ones_until_all_are_told(step_ahead: bool) -> None:
    first, second = run(
        [
            (1, add("a", [1], 40)),
            (1, Wake(1)),
            (3, Shutdown()),
            (4, add("late", [1], 1)),
            (5, Wake(2)),
        ],
        [(1, Wake(1)), (8, Shutdown()), (8, Wake(2))],
    )
    assert len(first.channel.tokens("a")) == 2 - step_ahead
    late = [o for r in first.channel.reports for o in r.outputs if o.request_id == "late"]
    assert len(late) == 1 and "shutting down" in str(late[0].error)
    assert first.blocks.num_used_blocks == 0
    # Rank 0 kept step until rank 1 was told too.
    assert len(first.runner.steps) == len(second.runner.steps) == 7


def test_fault_in_a_step_leaves_the_loop() -> None:
    with pytest.raises(RuntimeError, match="injected fault raise:rank=0:step=3"):
        run([(1, add("a", [1], 40)), (1, Wake(1))], faults="raise:rank=0:step=3")


class WatchedMasks:
    """Keeps what was begun last."""

    def __init__(self, real: GrammarMasks) -> None:
        self.real = real
        self.pending: Future[TokenMasks] | None = None

    def start(self, schedule: Schedule) -> "Future[TokenMasks] | None":
        self.pending = self.real.start(schedule)
        return self.pending


def test_masks_are_worked_out_while_the_model_computes() -> None:
    """The model's step here lasts until they are done. The request itself fails, as this model has
    no tokenizer; the one beside it does not.
    """
    plain = make_request("plain", [1, 2], 3)
    bound = make_request("bound", [3], 3, grammar="start: /a/")
    script: list[tuple[int, ToEngine]] = [(1, plain), (1, bound), (8, Shutdown()), (9, Wake(1))]
    rank = Rank(script, Table(1), 0, None)
    masks = WatchedMasks(GrammarMasks(engine_config().model, num_threads=1))
    rank.loop._grammars = masks  # type: ignore[assignment]
    was_done = []

    class PatientRunner(FakeRunner):
        def run(self, batch: StepBatch, dp_metadata: object, graph: GraphShape) -> torch.Tensor:
            if masks.pending is not None:
                was_done.append(bool(wait([masks.pending], PATIENCE_S).done))
            return super().run(batch, dp_metadata, graph)

    rank.loop._runner = PatientRunner()  # type: ignore[assignment]
    rank.loop.run()
    assert was_done == [True]
    assert rank.channel.tokens("plain") == expected_output([1, 2], 3, [])
    (error,) = [o.error for r in rank.channel.reports for o in r.outputs if o.error is not None]
    assert "end token" in error
