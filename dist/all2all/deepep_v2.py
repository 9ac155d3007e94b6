"""DeepEP's `ElasticBuffer`: one pair of calls for prompts and decode.

Rows come in the compact layout: once for each rank that holds one of their experts.
"""

import torch
import torch.distributed as dist

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.deepep import deep_ep_errors, destroy, library_of
from moed.dist.all2all.rows import going_to
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups


class DeepEPV2:
    """Backend `deepep_v2`. Making and closing it is collective."""

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
        self._num_slots, self._num_local_slots = placement.num_slots, placement.num_local_slots
        self._ranks = torch.arange(groups.world_size, device=device)
        self.traffic = Traffic.of_rows(
            fused_moe.hidden_size * dtype.itemsize, fused_moe.top_k, groups.world_size, device
        )
        self._capacity = fused_moe.dispatch_capacity
        library = library_of(capabilities.name, groups, device)
        with deep_ep_errors("making DeepEP's buffer"):
            if device.type == "cuda":
                # It uses torch's NCCL communicator, which the first collective makes.
                dist.barrier(group=groups.device, device_ids=[groups.local_rank])
            self._buffer = library.ElasticBuffer(
                groups.device,
                num_max_tokens_per_rank=self._capacity,
                hidden=fused_moe.hidden_size,
                num_topk=fused_moe.top_k,
                explicitly_destroy=True,
            )

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        with deep_ep_errors("elastic dispatch"):
            received, ids, weights, handle, _ = self._buffer.dispatch(
                hidden.contiguous(),
                topk_idx=topk_ids.contiguous(),
                topk_weights=topk_weights.contiguous(),
                num_experts=self._num_slots,
                num_max_tokens_per_rank=self._capacity,
                # One compilation for all steps, and counts on the host.
                do_cpu_sync=True,
            )
        goes_to = going_to(self._ranks, topk_ids, self._num_local_slots)
        self.traffic.rows_sent.add_(goes_to.sum(dim=1))
        # Weights of other ranks' choices are not cleared.
        weights = torch.where(ids >= 0, weights, 0.0)
        return Dispatched(received, ids, weights, None, handle)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. The experts have applied the weights."""
        with deep_ep_errors("elastic combine"):
            combined, _, _ = self._buffer.combine(expert_output.contiguous(), dispatched.state)
        result: torch.Tensor = combined
        return result

    def close(self) -> None:
        """See `All2AllBackend.close`."""
        if self._buffer is not None:
            destroy(self._buffer)
            self._buffer = None
