"""A row travels once to each rank that holds at least one of its experts, and one sum comes back.

Three collectives: counts, rows, results. They are the same for any number of rows, also none.
The host waits for the counts, which a graph must not. So in a graph, where all ranks have as many
rows, and few, each rank's go to all others, as in `allgather_reducescatter`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.allgather import AllGatherReduceScatter
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.rows import RowLayout, going_to
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups, collective_errors
from moed.dist.placement import local_slots


@dataclass(frozen=True)
class _State:
    own_rows: int
    sent_rows: torch.Tensor
    """[s] int64, the own row of each row sent, by destination rank."""
    send_counts: list[int]
    receive_counts: list[int]


class All2AllV:
    """Backend `all2allv`: bytes sent follow the rows."""

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
        self._ranks = torch.arange(placement.num_ranks, device=device)
        self._in_graphs = AllGatherReduceScatter(
            capabilities, groups, placement, fused_moe, dtype, device
        )
        self.traffic = self._in_graphs.traffic

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        if dp_metadata.padding is not None:
            return self._in_graphs.dispatch(hidden, topk_ids, topk_weights, dp_metadata)
        layout = self._layout
        goes_to = going_to(self._ranks, topk_ids, self._placement.num_local_slots)
        to_rank, row = goes_to.nonzero(as_tuple=True)
        send_counts = goes_to.sum(dim=1)
        self.traffic.rows_sent.add_(send_counts)
        outgoing = layout.empty(row.shape[0], hidden.device)
        layout.hidden(outgoing).copy_(hidden[row])
        layout.ids(outgoing).copy_(local_slots(topk_ids[row], self._placement, to_rank[:, None]))
        layout.weights(outgoing).copy_(topk_weights[row])
        receive_counts = torch.empty_like(send_counts)
        with collective_errors("exchange of row counts"):
            dist.all_to_all_single(receive_counts, send_counts, group=self._groups.device)
            # On a GPU a lost peer is only seen here, where the host waits for the counts.
            received = receive_counts.tolist()
        state = _State(hidden.shape[0], row, send_counts.tolist(), received)
        incoming = layout.empty(sum(state.receive_counts), hidden.device)
        with collective_errors("dispatch of rows"):
            dist.all_to_all_single(
                incoming,
                outgoing,
                state.receive_counts,
                state.send_counts,
                group=self._groups.device,
            )
        ids = layout.ids(incoming).long()
        return Dispatched(layout.hidden(incoming), ids, layout.weights(incoming), None, state)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. Partial sums are added in rank order, in float32."""
        state = dispatched.state
        if not isinstance(state, _State):
            return self._in_graphs.combine(expert_output, dispatched)
        hidden_size = expert_output.shape[1]
        returned = expert_output.new_empty(sum(state.send_counts), hidden_size)
        with collective_errors("combine of rows"):
            dist.all_to_all_single(
                returned,
                expert_output.contiguous(),
                state.send_counts,
                state.receive_counts,
                group=self._groups.device,
            )
        total = torch.zeros(
            state.own_rows, hidden_size, dtype=torch.float32, device=expert_output.device
        )
        # A row comes at most once from each rank, so each of these writes is free of conflicts.
        start = 0
        for count in state.send_counts:
            part = slice(start, start + count)
            total[state.sent_rows[part]] += returned[part]
            start += count
        return total.to(expert_output.dtype)

    def close(self) -> None:
        """Nothing is held."""
