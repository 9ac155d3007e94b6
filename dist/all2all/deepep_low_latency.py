"""DeepEP's low-latency calls: rows arrive by expert, and combine weighs and sums them.

One dispatch is received before its combine is sent, and that one before the next dispatch: at no
time is there more than one call in flight, which is DeepEP's rule for its two buffers.

Legend: n own rows, N capacity, R ranks, L slots of a rank, D hidden, K top-k.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.deepep import deep_ep_errors, destroy, library_of, set_queue_depth
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups


@dataclass(frozen=True)
class _State:
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    handle: Any
    """DeepEP's."""


class DeepEPLowLatency:
    """Backend `deepep_low_latency`. Making and closing it is collective."""

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
        # A row travels once for each choice; the first place is for choices that go nowhere.
        self._sent = torch.zeros(groups.world_size + 1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        row_bytes = fused_moe.hidden_size * dtype.itemsize
        self.traffic = Traffic(self._sent[1:], row_bytes, row_bytes)
        self._capacity = fused_moe.dispatch_capacity
        library = library_of(capabilities.name, groups, device)
        set_queue_depth(self._capacity)
        num_bytes = library.Buffer.get_low_latency_rdma_size_hint(
            self._capacity, fused_moe.hidden_size, groups.world_size, self._num_slots
        )
        with deep_ep_errors("making DeepEP's buffer"):
            self._buffer = library.Buffer(
                groups.device,
                num_rdma_bytes=num_bytes,
                low_latency_mode=True,
                # The kernels stop the GPU with fewer.
                num_qps_per_rank=placement.num_local_slots,
                explicitly_destroy=True,
            )

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`: `hidden` becomes [L, R x N, D]."""
        ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
        with deep_ep_errors("low-latency dispatch"):
            received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
                hidden.contiguous(), ids, self._capacity, self._num_slots, use_fp8=False
            )
        self._count(ids)
        return Dispatched(received, None, None, counts, _State(ids, weights, handle))

    def _count(self, topk_ids: torch.Tensor) -> None:
        """On the device, which is not waited for."""
        num_slots = self._num_local_slots
        places = torch.div(topk_ids + num_slots, num_slots, rounding_mode="floor").flatten()
        self._sent.scatter_add_(0, places, self._one.expand_as(places))

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. Weights are applied here, in float32, in the order of K."""
        state: _State = dispatched.state
        # Memory of our own, since DeepEP lets nobody hold more than two of its results.
        shape = (state.topk_ids.shape[0], expert_output.shape[-1])
        combined = expert_output.new_empty(shape)
        with deep_ep_errors("low-latency combine"):
            self._buffer.low_latency_combine(
                expert_output, state.topk_ids, state.topk_weights, state.handle, out=combined
            )
        return combined

    def close(self) -> None:
        """See `All2AllBackend.close`."""
        if self._buffer is not None:
            destroy(self._buffer)
            self._buffer = None
