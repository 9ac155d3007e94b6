"""What one step of one rank computes: the scheduler's choice as tensors.

Legend: T tokens of this step (0 <= T <= B), R requests in it, P the most blocks any holds.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moed.moe.part_times import PartTimes

if TYPE_CHECKING:
    from moed.moe.attention import StepAttention


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of all requests, one after the other; a rank without work has T = R = 0."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, position of each token in its request."""
    slot_mapping: torch.Tensor
    """[T] int64, where K and V of each token go: block id * block size + offset."""
    query_lens: tuple[int, ...]
    """[R] tokens of each request in this step; they sum to T."""
    context_lens: tuple[int, ...]
    """[R] tokens of each request in the KV cache after this step (so the last query's position +
    1).
    """
    block_tables: torch.Tensor
    """[R, P] int64 block ids, rows padded with 0."""
    logits_indices: torch.Tensor
    """[J] int64, the rows of T whose logits are wanted."""
    window_slot_mapping: torch.Tensor | None = None
    """As `slot_mapping`, for the layers that slide; None: they have the same blocks."""
    window_block_tables: torch.Tensor | None = None
    """As `block_tables`, for the layers that slide; 0 for blocks that no token sees any more."""
    routed_experts: torch.Tensor | None = None
    """[T, M, K] int32 for the M MoE layers, to be filled with the experts that each token is routed
    to; None: nobody asks.
    """
    attention: "tuple[StepAttention, StepAttention] | None" = None
    """Of layers that see the whole context, and of those that slide; None: made in the step."""
    times: PartTimes | None = None
    """Is told how long the parts of each layer take; None: nobody asks."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
