"""DeepEP's high-throughput calls: a row travels once to each rank that holds one of its experts,
and combine sums what comes back.
"""

from typing import Any

import torch

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.deepep import deep_ep_errors, destroy, library_of
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups

MIN_NUMBER_BYTES = 2
"""The buffers are sized for numbers of 16 bits at least, whatever travels."""


class DeepEPHighThroughput:
    """Backend `deepep_high_throughput`. Making and closing it is collective."""

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
        self._num_slots = placement.num_slots
        self.traffic = Traffic.of_rows(
            fused_moe.hidden_size * dtype.itemsize, fused_moe.top_k, groups.world_size, device
        )
        library = library_of(capabilities.name, groups, device)
        nvl, rdma = buffer_bytes(library, groups.world_size, fused_moe.hidden_size, dtype)
        with deep_ep_errors("making DeepEP's buffer"):
            self._buffer = library.Buffer(
                groups.device, num_nvl_bytes=nvl, num_rdma_bytes=rdma, explicitly_destroy=True
            )

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        ids = topk_ids.contiguous()
        with deep_ep_errors("high-throughput dispatch"):
            per_rank, per_node, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
                ids, self._num_slots
            )
            received, received_ids, weights, _, handle, _ = self._buffer.dispatch(
                hidden.contiguous(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=topk_weights.contiguous(),
            )
        self.traffic.rows_sent.add_(per_rank)
        return Dispatched(received, received_ids, weights, None, handle)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. The experts have applied the weights."""
        with deep_ep_errors("high-throughput combine"):
            combined, _, _ = self._buffer.combine(expert_output.contiguous(), dispatched.state)
        result: torch.Tensor = combined
        return result

    def close(self) -> None:
        """See `All2AllBackend.close`."""
        if self._buffer is not None:
            destroy(self._buffer)
            self._buffer = None


def buffer_bytes(
    library: Any, num_ranks: int, hidden_size: int, dtype: torch.dtype
) -> tuple[int, int]:
    """NVLink and RDMA bytes that the recommended settings of both calls ask for."""
    row_bytes = hidden_size * max(dtype.itemsize, MIN_NUMBER_BYTES)
    configs = (
        library.Buffer.get_dispatch_config(num_ranks),
        library.Buffer.get_combine_config(num_ranks),
    )
    return (
        max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
    )
