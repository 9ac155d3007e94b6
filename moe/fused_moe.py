"""One MoE layer: route, dispatch, experts, combine, once each, whatever the number of rows."""

from collections.abc import Callable

import torch

from moed.config.engine_config import FusedMoEConfig
from moed.config.errors import ConfigError, TokenBudgetExceeded
from moed.dist.all2all.base import All2AllBackend, Dispatched
from moed.dist.dp_metadata import DPMetadata
from moed.dist.placement import SlotMap
from moed.dist.tensor_parallel import TensorParallel
from moed.moe.experts import Experts
from moed.moe.part_times import Part, PartTimes
from moed.moe.router import Router
from moed.moe.shared_experts import SharedExperts, SharedRun


class FusedMoE:
    """Legend: n rows of the DP rank (0 <= n <= B), c those of this member, D hidden, K top-k."""

    def __init__(
        self,
        config: FusedMoEConfig,
        router: Router,
        experts: Experts,
        backend: All2AllBackend,
        slots: SlotMap,
        tensor_parallel: TensorParallel,
        shared: SharedExperts | None,
    ) -> None:
        """Raises `ConfigError` when the weights scale the experts' input and a row has several."""
        if router.spec.weighs_input and config.top_k != 1:
            raise ConfigError(
                f"the router's weights scale the experts' input, and a token goes to "
                f"{config.top_k} experts: a row that travels once can be scaled once, so only "
                "top-k 1 is served"
            )
        self._config = config
        self._router = router
        self._experts = experts
        self._backend = backend
        self._slots = slots
        self._tensor_parallel = tensor_parallel
        self._shared = shared
        on_gpu = shared is not None and shared.down.is_cuda
        self._shared_stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def join(self, backend: All2AllBackend) -> None:
        """Go on with the same backend of a new group."""
        self._backend = backend

    def __call__(
        self,
        hidden: torch.Tensor,
        dp_metadata: DPMetadata,
        routed_experts: torch.Tensor | None = None,
        times: PartTimes | None = None,
    ) -> torch.Tensor:
        """[n, D] for `hidden` [n, D]. Every rank calls it for every layer, also with n = 0.
        `routed_experts` [n, K] is filled with the chosen experts of all rows; `times` is told how
        long the parts take.

        Raises `TokenBudgetExceeded`, before any collective, when n is above B.
        """
        num_rows = hidden.shape[0]
        self.check(num_rows, dp_metadata)
        if routed_experts is not None:
            # Apart from the way of the rows, of which each member sees its share alone.
            routed_experts.copy_(self._router.route(hidden)[1])
        own = self._tensor_parallel.share(hidden, 0.0)
        shared = None
        if self._shared is not None:
            shared = SharedRun(self._shared, own, self._shared_stream)
        combined = self._routed(own, num_rows, dp_metadata, times)
        if shared is not None:
            combined = shared.add_to(combined)
        return self._tensor_parallel.gather(combined, num_rows)

    def _routed(
        self,
        own: torch.Tensor,
        num_rows: int,
        dp_metadata: DPMetadata,
        times: PartTimes | None,
    ) -> torch.Tensor:
        """[c, D]: the chosen experts' part, for `own` [c, D] of the rank's `num_rows`."""
        weights, ids = self._router.route(own)
        self._drop_fill(ids, num_rows, dp_metadata.padding)
        # Exactly one place applies the weights: here, the experts, or the backend's combine.
        if self._router.spec.weighs_input:
            own, weights = own * weights.to(own.dtype), torch.ones_like(weights)
        by_backend = self._backend.capabilities.applies_router_weights
        dispatch, combine = self._backend.dispatch, self._backend.combine
        experts: Callable[[Dispatched, bool], torch.Tensor] = self._experts
        if times is not None:
            dispatch = times.timing(Part.DISPATCH, dispatch)
            experts = times.timing(Part.EXPERTS, experts)
            combine = times.timing(Part.COMBINE, combine)
        dispatched = dispatch(own, self._slots.to_slots(ids), weights, dp_metadata)
        output = experts(dispatched, not (by_backend or self._router.spec.weighs_input))
        return combine(output, dispatched)

    def _drop_fill(self, ids: torch.Tensor, num_rows: int, padding: torch.Tensor | None) -> None:
        """Rows that only fill up a member's share, or a graph's bucket (`padding` [num_rows] bool),
        go to no expert. In place.
        """
        tensor_parallel = self._tensor_parallel
        if padding is not None:
            ids.masked_fill_(tensor_parallel.share(padding, True)[:, None], -1)
        num_own = num_rows - tensor_parallel.rank * ids.shape[0]
        if num_own < ids.shape[0]:
            ids[max(num_own, 0) :] = -1

    def check(self, num_rows: int, dp_metadata: DPMetadata) -> None:
        """Raises `TokenBudgetExceeded` when `num_rows` is above B."""
        budget = self._config.max_num_tokens
        if num_rows > budget:
            raise TokenBudgetExceeded(
                f"rank {dp_metadata.rank}, step {dp_metadata.step_id}: {num_rows} rows reached a "
                f"MoE layer, and max_num_batched_tokens is {budget}"
            )
