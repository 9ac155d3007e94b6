"""The one coordination of a step: gather a small record of every rank, decide the same from it.

What follows from the records (run, sleep, stop) is the pure function `decide`. A rank sleeps only
when all are idle and all have seen the same wake number, and wakes on a higher one; it never steps
by itself. So ranks always issue the same collectives in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

import torch
import torch.distributed as dist

from moed.config.engine_config import ParallelConfig
from moed.config.errors import PeerLost, RankMismatch
from moed.config.graphs import EAGER, GraphShape
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups, collective_errors
from moed.dist.record_exchange import RecordExchange, make_exchange


class RankState(IntEnum):
    """What a rank says of itself."""

    IDLE = 0
    WORKING = 1
    DRAINING = 2
    """Takes no new work, finishes what it has."""
    STOPPING = 3
    """Has dropped its work and will leave with the others."""
    FAILED = 4
    """Will raise after this step's agreement; the others must not wait for it."""


@dataclass(frozen=True)
class StepRecord:
    """One rank's entry in the step's gather: eight int64."""

    step_id: int
    num_tokens: int
    state: RankState
    wake_number: int
    graph: GraphShape
    """The CUDA graph that this rank could replay, or `EAGER`."""
    has_prompts: bool
    """Some of its tokens are of prompts."""
    config_digest: int

    def to_ints(self) -> list[int]:
        return [
            self.step_id,
            self.num_tokens,
            int(self.state),
            self.wake_number,
            self.graph.num_rows,
            self.graph.num_blocks,
            int(self.has_prompts),
            self.config_digest,
        ]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> "StepRecord":
        step_id, num_tokens, state, wake_number, *graph, has_prompts, digest = values
        shape = GraphShape(*graph)
        return cls(
            step_id, num_tokens, RankState(state), wake_number, shape, bool(has_prompts), digest
        )


NUM_FIELDS = 8


class DecisionKind(Enum):
    RUN = auto()
    SLEEP = auto()
    STOP = auto()


@dataclass(frozen=True)
class Decision:
    """What all ranks do next."""

    kind: DecisionKind
    graph: GraphShape = EAGER
    """What the graph that every rank replays must hold: the most rows and the widest tables of all
    ranks with tokens, `EAGER` when one of them cannot replay any or none has tokens.
    """


def decide(records: Sequence[StepRecord], tensor_parallel_size: int) -> Decision:
    """What follows from the records of one step; the same on every rank.

    Raises `RankMismatch` when step ids or digests differ, or members of one DP rank in their
    tokens, `PeerLost` when a rank says it failed.
    """
    for key in ("step_id", "config_digest"):
        values = {getattr(record, key) for record in records}
        if len(values) > 1:
            listed = ", ".join(
                f"rank {rank}: {getattr(record, key)}" for rank, record in enumerate(records)
            )
            raise RankMismatch(
                f"the ranks differ in {key} ({listed}); they must be started together, with the "
                "same settings and model"
            )
    failed = [rank for rank, record in enumerate(records) if record.state is RankState.FAILED]
    if failed:
        raise PeerLost(f"rank {failed[0]} has failed; its own error says why")
    _check_members(records, tensor_parallel_size)
    if all(record.state is RankState.STOPPING for record in records):
        return Decision(DecisionKind.STOP)
    is_idle = all(record.state is RankState.IDLE and record.num_tokens == 0 for record in records)
    if is_idle and len({record.wake_number for record in records}) == 1:
        return Decision(DecisionKind.SLEEP)
    return Decision(DecisionKind.RUN, _graph(records))


def _graph(records: Sequence[StepRecord]) -> GraphShape:
    shapes = [record.graph for record in records if record.num_tokens]
    if not shapes or EAGER in shapes:
        return EAGER
    return GraphShape(
        max(shape.num_rows for shape in shapes), max(shape.num_blocks for shape in shapes)
    )


def _check_members(records: Sequence[StepRecord], tensor_parallel_size: int) -> None:
    for rank, record in enumerate(records):
        leader = rank // tensor_parallel_size * tensor_parallel_size
        expected = records[leader].num_tokens
        if record.num_tokens != expected:
            raise RankMismatch(
                f"rank {leader} runs {expected} tokens in step {record.step_id}, and rank {rank}, "
                f"which computes the same tokens with it, {record.num_tokens}"
            )


@dataclass(frozen=True)
class Agreed:
    """One step's agreement."""

    decision: Decision
    dp_metadata: DPMetadata
    records: tuple[StepRecord, ...]

    @property
    def has_prompts(self) -> bool:
        """Experts see rows of some rank's prompts in this step."""
        return any(record.has_prompts for record in self.records)


class Agreement:
    """Called at one fixed place of the loop; its communicator carries nothing else on GPUs."""

    def __init__(self, groups: Groups, parallel: ParallelConfig, config_digest: int) -> None:
        self._groups = groups
        self._parallel = parallel
        self._config_digest = config_digest
        self._exchange: RecordExchange | None = None
        if groups.world_size > 1:
            self._exchange = make_exchange(groups, parallel.agreement_backend, NUM_FIELDS)

    def agree(
        self,
        step_id: int,
        num_tokens: int,
        state: RankState,
        wake_number: int,
        graph: GraphShape = EAGER,
        has_prompts: bool = False,
    ) -> Agreed:
        """Collective, once per step. Raises `RankMismatch` or `PeerLost`, on every rank alike."""
        own = StepRecord(
            step_id, num_tokens, state, wake_number, graph, has_prompts, self._config_digest
        )
        records = self._gather(own)
        decision = decide(records, self._parallel.tensor_parallel_size)
        # The first member speaks for its DP rank; `decide` has seen that the others say the same.
        leaders = records[:: self._parallel.tensor_parallel_size]
        sizes = torch.tensor([record.num_tokens for record in leaders], dtype=torch.int32)
        dp_metadata = DPMetadata.make(
            self._parallel, num_tokens, sizes, rank=self._groups.data_parallel_rank, step_id=step_id
        )
        return Agreed(decision, dp_metadata, records)

    def _gather(self, own: StepRecord) -> tuple[StepRecord, ...]:
        if self._exchange is None:
            return (own,)
        with collective_errors(f"agreement of step {own.step_id}"):
            rows = self._exchange.exchange(own.to_ints())
        return tuple(StepRecord.from_ints(row) for row in rows)


def gather_ints(groups: Groups, value: int) -> list[int]:
    """Every rank's `value`, by rank. Collective."""
    gathered = torch.zeros(groups.world_size, dtype=torch.int64)
    own = torch.tensor([value], dtype=torch.int64)
    with collective_errors("gather of a number"):
        dist.all_gather_single(gathered, own, group=groups.cpu)
    values: list[int] = gathered.tolist()
    return values
