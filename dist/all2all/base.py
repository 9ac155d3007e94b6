"""The one interface of all dispatch backends: `dispatch`, experts, `combine`, once per MoE layer.

Legend: n own rows (0 <= n <= B), r rows after dispatch, D hidden, K top-k, e local experts,
C capacity per expert.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moed.config.capabilities import BackendCapabilities
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata


@dataclass(frozen=True)
class Dispatched:
    """Rows at the ranks of their experts, and what `combine` needs to bring the results home.

    Standard format: `hidden` [r, D]; `expert_ids` [r, K] int64 *local* slots, -1 where that choice
    lives on another rank; `expert_weights` [r, K] float32. Batched format: `hidden` [e, C, D] and
    `num_rows_per_expert` [e] int32; rows beyond an expert's count are garbage, and the other two
    are None.
    """

    hidden: torch.Tensor
    expert_ids: torch.Tensor | None
    expert_weights: torch.Tensor | None
    num_rows_per_expert: torch.Tensor | None
    state: Any
    """The backend's own notes from dispatch to combine; nobody else reads it."""


class All2AllBackend(Protocol):
    """Carries rows to their experts and results back. Created once per process, holds no state of a
    step; it only counts.
    """

    capabilities: BackendCapabilities
    traffic: Traffic

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """Send own rows to the ranks that hold their experts.

        `hidden` [n, D] model dtype; `topk_ids` [n, K] int64 *slots* (see `ExpertPlacement`), -1
        for nothing; `topk_weights` [n, K] float32. Every rank calls it the same number of times per
        step, with n = 0 when it has no work. Raises `PeerLost` when a peer went away.
        """
        ...

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Return [n, D]: for each own row, in its own order, the sum over its experts.

        `expert_output` has the shape of `dispatched.hidden`. Where
        `capabilities.applies_router_weights` is False the experts have already weighted and summed
        the choices that live on their rank.
        """
        ...

    def close(self) -> None:
        """Free buffers. Safe to call twice."""
        ...
