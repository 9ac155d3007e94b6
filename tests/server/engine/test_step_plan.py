"""Plans reach the other members as they were made."""

from collections.abc import Callable

import torch

from moed.dist.agreement import RankState
from moed.dist.groups import Groups
from moed.moe.batch import ForwardBatch
from moed.server.step_plan import StepPlan, StepPlans, decode, encode
from tests.dist.members import with_members
from tests.worker_pool import WorkerPool

CPU = torch.device("cpu")


def batch_of(*query_lens: int) -> ForwardBatch:
    """Requests with 5 tokens before this step, in blocks of 4."""
    num_tokens = sum(query_lens)
    contexts = tuple(5 + count for count in query_lens)
    width = max((-(-context // 4) for context in contexts), default=0)
    return ForwardBatch(
        token_ids=torch.arange(num_tokens) + 100,
        positions=torch.cat(
            [torch.arange(count) + 5 for count in query_lens] or [torch.empty(0)]
        ).long(),
        slot_mapping=torch.arange(num_tokens) * 3,
        query_lens=query_lens,
        context_lens=contexts,
        block_tables=torch.arange(len(query_lens) * width).view(len(query_lens), width),
        logits_indices=torch.tensor([num_tokens - 1] if num_tokens else [], dtype=torch.int64),
    )


BATCHES = [batch_of(3, 1, 7), batch_of(1), batch_of()]


def assert_same(found: StepPlan, sent: StepPlan) -> None:
    assert (found.step_id, found.state) == (sent.step_id, sent.state)
    for name in ("token_ids", "positions", "slot_mapping", "block_tables"):
        one, other = getattr(found.batch, name), getattr(sent.batch, name)
        assert torch.equal(one, other) and one.dtype == torch.int64, name
    assert found.batch.query_lens == sent.batch.query_lens
    assert found.batch.context_lens == sent.batch.context_lens
    # Logits are the first member's business.
    assert found.batch.logits_indices.shape == (0,)


def test_a_plan_survives_its_way() -> None:
    for step, batch in enumerate(BATCHES):
        plan = StepPlan(step, RankState.WORKING, batch)
        assert_same(decode(*encode(plan), CPU), plan)


def pass_on(groups: Groups) -> list[StepPlan]:
    """The second member of each group receives what the first one sends."""
    groups = with_members(groups, 2)
    plans = StepPlans(groups, CPU)
    received = []
    for step, batch in enumerate(BATCHES):
        if groups.tensor_rank == 0:
            state = RankState.IDLE if groups.data_parallel_rank else RankState.WORKING
            plans.send(StepPlan(step, state, batch))
        else:
            received.append(plans.receive())
    return received


def test_members_receive_their_own_first_member_s_plans(
    workers: Callable[[int], WorkerPool],
) -> None:
    answers = workers(4).run(pass_on)
    assert answers[0] == answers[2] == []
    for answer, state in ((answers[1], RankState.WORKING), (answers[3], RankState.IDLE)):
        for step, (found, batch) in enumerate(zip(answer, BATCHES, strict=True)):
            assert_same(found, StepPlan(step, state, batch))
