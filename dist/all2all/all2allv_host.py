"""`all2allv` between ranks of one host: the same rows, through memory that they share.

Each rank lays out its rows once, and the others take those that have an expert with them; results
lie at the places of their rows, from where the row's own rank sums them up. Two exchanges a layer,
for any number of rows.

Legend: n own rows, r rows after dispatch, D hidden, K top-k.
"""

import ctypes
import dataclasses
from dataclasses import dataclass

import torch

from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups, collective_errors
from moed.dist.host.channel import HostChannel, open_channel

DTYPES = (torch.float32, torch.bfloat16)
EXCHANGES_PER_LAYER = 2


class _RowSizes(ctypes.Structure):
    """See exchange.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("capacity", "top_k", "row_bytes", "num_local_slots", "is_bf16")
    ]


@dataclass(frozen=True)
class _State:
    own_rows: int
    sizes: torch.Tensor
    """[ranks] int64: rows of every rank."""
    places: torch.Tensor
    """[r] int64: of each received row among the rows of all ranks."""


class All2AllVOnHost:
    """Backend `all2allv`, where `open_for` finds that it can be had."""

    def __init__(
        self,
        capabilities: BackendCapabilities,
        channel: HostChannel,
        placement: ExpertPlacement,
        fused_moe: FusedMoEConfig,
        dtype: torch.dtype,
    ) -> None:
        self.capabilities = dataclasses.replace(
            capabilities, collectives_per_layer=EXCHANGES_PER_LAYER
        )
        self._channel = channel
        self._capacity = fused_moe.dispatch_capacity
        self._dtype = dtype
        self._total = torch.empty(fused_moe.hidden_size, dtype=torch.float32)
        row_bytes, num_ranks = fused_moe.hidden_size * dtype.itemsize, placement.num_ranks
        self.traffic = Traffic.of_rows(row_bytes, fused_moe.top_k, num_ranks, torch.device("cpu"))
        self._rows = _RowSizes(
            fused_moe.dispatch_capacity,
            fused_moe.top_k,
            row_bytes,
            placement.num_local_slots,
            dtype == torch.bfloat16,
        )

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        sizes = dp_metadata.row_sizes
        assert hidden.dtype == self._dtype and max(sizes) <= self._capacity
        all_sizes = torch.tensor(sizes, dtype=torch.int64)
        num_rows, top_k = sum(sizes), topk_ids.shape[1]
        hidden, topk_ids, topk_weights = (
            tensor.contiguous() for tensor in (hidden, topk_ids, topk_weights)
        )
        received = hidden.new_empty(num_rows, hidden.shape[1])
        ids = topk_ids.new_empty(num_rows, top_k)
        weights = topk_weights.new_empty(num_rows, top_k)
        places = topk_ids.new_empty(num_rows)
        count = ctypes.c_int64()
        with collective_errors("dispatch of rows"):
            self._channel.run(
                self._channel.calls.dispatch,
                ctypes.addressof(self._rows),
                all_sizes.data_ptr(),
                hidden.data_ptr(),
                topk_ids.data_ptr(),
                topk_weights.data_ptr(),
                received.data_ptr(),
                ids.data_ptr(),
                weights.data_ptr(),
                places.data_ptr(),
                ctypes.addressof(count),
            )
        r = count.value
        state = _State(hidden.shape[0], all_sizes, places)
        return Dispatched(received[:r], ids[:r], weights[:r], None, state)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`. Partial sums are added in rank order, in float32."""
        state = dispatched.state
        results = expert_output.contiguous()
        combined = results.new_empty(state.own_rows, results.shape[1])
        with collective_errors("combine of rows"):
            self._channel.run(
                self._channel.calls.combine,
                ctypes.addressof(self._rows),
                state.sizes.data_ptr(),
                results.data_ptr(),
                state.places.data_ptr(),
                results.shape[0],
                self._total.data_ptr(),
                combined.data_ptr(),
                self.traffic.rows_sent.data_ptr(),
            )
        return combined

    def close(self) -> None:
        """Tell the others. Safe to call twice."""
        self._channel.close()


def open_for(
    capabilities: BackendCapabilities,
    groups: Groups,
    placement: ExpertPlacement,
    fused_moe: FusedMoEConfig,
    dtype: torch.dtype,
) -> All2AllVOnHost | None:
    """The backend, or None on all ranks alike. Collective."""
    if dtype not in DTYPES or placement.is_sharded:
        return None
    # Ids, weights and hidden of the own rows; results for the rows of all ranks.
    own = fused_moe.top_k * 12 + fused_moe.hidden_size * dtype.itemsize
    result = fused_moe.hidden_size * dtype.itemsize * groups.world_size
    channel = open_channel(groups, fused_moe.dispatch_capacity * (own + result))
    if channel is None:
        return None
    return All2AllVOnHost(capabilities, channel, placement, fused_moe, dtype)
