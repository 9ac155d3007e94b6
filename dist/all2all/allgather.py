"""Every rank sees all rows, computes the experts it holds, and the sums are scattered back.

Sizes are known from the step's agreement, so nothing is padded and no counts travel: an all-gather
of unequal sizes is an all-to-all in which each rank sends its rows to everyone, and a
reduce-scatter one in which each rank sends everyone the partial sums of their rows. Nor does
anything wait for the device: a graph may hold it, with the sizes of its bucket.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.rows import RowLayout, sum_parts
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups, collective_errors
from moed.dist.placement import local_slots


@dataclass(frozen=True)
class _State:
    sizes: list[int]
    """Rows of each rank."""
    own_rows: int


class AllGatherReduceScatter:
    """Backend `allgather_reducescatter`: two collectives per layer."""

    def __init__(
        self,
        capabilities: BackendCapabilities,
        groups: Groups,
        placement: ExpertPlacement,
        fused_moe: FusedMoEConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capabilities = capabilities
        self._groups = groups
        self._layout = RowLayout(fused_moe.hidden_size, fused_moe.top_k, dtype)
        self._placement = placement
        self.traffic = Traffic.of_layout(self._layout, groups.world_size, device)

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        sizes, num_rows, layout = dp_metadata.row_sizes, hidden.shape[0], self._layout
        own = layout.empty(num_rows, hidden.device)
        layout.hidden(own).copy_(hidden)
        # Each receiver knows its own slots.
        layout.ids(own).copy_(topk_ids)
        layout.weights(own).copy_(topk_weights)
        received = layout.empty(sum(sizes), hidden.device)
        self.traffic.rows_sent.add_(num_rows)
        with collective_errors("all-gather of rows"):
            dist.all_to_all_single(
                received,
                own.repeat(len(sizes), 1),
                sizes,
                [num_rows] * len(sizes),
                group=self._groups.device,
            )
        ids = local_slots(layout.ids(received).long(), self._placement, self._groups.rank)
        return Dispatched(
            layout.hidden(received), ids, layout.weights(received), None, _State(sizes, num_rows)
        )

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. Partial sums are added in rank order."""
        state: _State = dispatched.state
        num_ranks = len(state.sizes)
        returned = expert_output.new_empty(num_ranks * state.own_rows, expert_output.shape[1])
        with collective_errors("reduce-scatter of rows"):
            dist.all_to_all_single(
                returned,
                expert_output.contiguous(),
                [state.own_rows] * num_ranks,
                state.sizes,
                group=self._groups.device,
            )
        return sum_parts(
            list(returned.view(num_ranks, state.own_rows, expert_output.shape[1])), returned
        )

    def close(self) -> None:
        """Nothing is held."""
