"""What the first member of a tensor-parallel group tells the others before each step's agreement.

The first member alone schedules, holds the KV blocks and samples. A plan is one row of numbers: a
header of fixed size, and the batch's tensors one after the other.

Legend: T tokens, R requests, P the most blocks any holds.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moed.dist.agreement import RankState
from moed.dist.groups import Groups, collective_errors
from moed.moe.batch import ForwardBatch

NUM_HEADER_FIELDS = 7


@dataclass(frozen=True)
class StepPlan:
    """The step as the members need it; logits are the first member's business."""

    step_id: int
    state: RankState
    batch: ForwardBatch


def encode(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Header [6] and body, both int64 on the CPU."""
    batch = plan.batch
    parts = [
        batch.token_ids.cpu(),
        batch.positions.cpu(),
        batch.slot_mapping.cpu(),
        torch.tensor(batch.query_lens, dtype=torch.int64),
        torch.tensor(batch.context_lens, dtype=torch.int64),
        batch.block_tables.cpu().flatten(),
    ]
    window_slots, window_tables = batch.window_slot_mapping, batch.window_block_tables
    if window_slots is not None and window_tables is not None:
        parts += [window_slots.cpu(), window_tables.cpu().flatten()]
    body = torch.cat(parts)
    num_requests, num_blocks = batch.block_tables.shape
    header = [
        *(plan.step_id, int(plan.state), batch.num_tokens, num_requests, num_blocks),
        *(int(window_slots is not None), len(body)),
    ]
    return torch.tensor(header, dtype=torch.int64), body


def decode(header: torch.Tensor, body: torch.Tensor, device: torch.device) -> StepPlan:
    """The inverse of `encode`, with tensors on `device` and no logits asked for."""
    step_id, state, num_tokens, num_requests, num_blocks, has_window, _ = header.tolist()
    sizes = [num_tokens] * 3 + [num_requests] * 2 + [num_requests * num_blocks]
    sizes += [num_tokens, num_requests * num_blocks] * has_window
    tokens, positions, slots, queries, contexts, blocks, *window = body.split_with_sizes(sizes)
    shape = (num_requests, num_blocks)
    batch = ForwardBatch(
        token_ids=tokens.to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_lens=tuple(queries.tolist()),
        context_lens=tuple(contexts.tolist()),
        block_tables=blocks.view(shape).to(device),
        logits_indices=torch.empty(0, dtype=torch.int64, device=device),
        window_slot_mapping=window[0].to(device) if has_window else None,
        window_block_tables=window[1].view(shape).to(device) if has_window else None,
    )
    return StepPlan(step_id, RankState(state), batch)


class StepPlans:
    """Carries plans inside one tensor-parallel group; costs nothing where a rank is alone."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._group = groups.tensor
        self._source = groups.rank - groups.tensor_rank
        self._device = device

    def send(self, plan: StepPlan) -> None:
        """On the first member. Raises `PeerLost`."""
        if self._group is None:
            return
        header, body = encode(plan)
        with collective_errors(f"plan of step {plan.step_id}"):
            dist.broadcast(header, src=self._source, group=self._group)
            if len(body):
                dist.broadcast(body, src=self._source, group=self._group)

    def receive(self) -> StepPlan:
        """On the others: waits for the first member's next plan. Raises `PeerLost`."""
        header = torch.empty(NUM_HEADER_FIELDS, dtype=torch.int64)
        with collective_errors("plan of a step"):
            dist.broadcast(header, src=self._source, group=self._group)
            body = torch.empty(int(header[-1]), dtype=torch.int64)
            if len(body):
                dist.broadcast(body, src=self._source, group=self._group)
        return decode(header, body, self._device)
