"""One MoE layer: route, dispatch, experts, combine, once each, whatever the number of rows."""

import torch
import torch.nn.functional as F

from moed.config.engine_config import FusedMoEConfig
from moed.config.errors import TokenBudgetExceeded
from moed.dist.all2all.base import All2AllBackend
from moed.dist.dp_metadata import DPMetadata
from moed.moe.experts import Experts
from moed.moe.router import route


class FusedMoE:
    """Legend: n own rows (0 <= n <= B), D hidden, E experts."""

    def __init__(
        self,
        config: FusedMoEConfig,
        router_weight: torch.Tensor,
        renormalize: bool,
        experts: Experts,
        backend: All2AllBackend,
    ) -> None:
        """`router_weight` [E, D]."""
        self._config = config
        self._router_weight = router_weight
        self._renormalize = renormalize
        self._experts = experts
        self._backend = backend

    def __call__(self, hidden: torch.Tensor, dp_metadata: DPMetadata) -> torch.Tensor:
        """[n, D] for `hidden` [n, D]. Every rank calls it for every layer, also with n = 0.

        Raises `TokenBudgetExceeded`, before any collective, when n is above B.
        """
        self.check(hidden.shape[0], dp_metadata)
        logits = F.linear(hidden, self._router_weight)
        weights, ids = route(logits, self._config.top_k, self._renormalize)
        dispatched = self._backend.dispatch(hidden, ids, weights, dp_metadata)
        # Exactly one of the two applies the router weights.
        apply_weights = not self._backend.capabilities.applies_router_weights
        output = self._experts(dispatched, apply_weights)
        return self._backend.combine(output, dispatched)

    def check(self, num_rows: int, dp_metadata: DPMetadata) -> None:
        """Raises `TokenBudgetExceeded` when `num_rows` is above B."""
        budget = self._config.max_num_tokens
        if num_rows > budget:
            raise TokenBudgetExceeded(
                f"rank {dp_metadata.rank}, step {dp_metadata.step_id}: {num_rows} rows reached a "
                f"MoE layer, and max_num_batched_tokens is {budget}"
            )
