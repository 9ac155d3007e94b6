"""Received rows, laid out by expert as low-latency mode has them.

L local experts, C = R x N rows at most for one expert, H hidden size, n rows received.
"""

from dataclasses import dataclass

import torch

from moed.config.deep_ep_limits import ALIGNMENT_CHANNELS
from moed.dist.deep_ep import fp8
from moed.dist.deep_ep.events import garbage
from moed.dist.deep_ep.rules import Shape
from moed.dist.deep_ep.wire import RowFormat, Scrambler

COUNT_BITS = 32
COUNT_MASK = 2**COUNT_BITS - 1


@dataclass(frozen=True)
class Transport:
    """How values travel: `dtype` as they are, or in 8 bits with scales."""

    dtype: torch.dtype
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.int32 if self.use_ue8m0 else torch.float32

    def _num_scales(self, hidden_size: int) -> int:
        return hidden_size // ALIGNMENT_CHANNELS // (4 if self.use_ue8m0 else 1)

    def row_format(self, hidden_size: int) -> RowFormat:
        """Local expert and source token, values, scales."""
        indexes = (torch.int32, 2)
        if not self.use_fp8:
            return RowFormat((indexes, (self.dtype, hidden_size)))
        scales = (self._scale_dtype, self._num_scales(hidden_size))
        return RowFormat((indexes, (torch.float8_e4m3fn, hidden_size), scales))

    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[T, H] to what travels of it."""
        if not self.use_fp8:
            return [x]
        data, scales = fp8.quantize(x, round_scale=self.round_scale)
        return [data, fp8.pack_ue8m0(scales) if self.use_ue8m0 else scales]

    def new_received(self, num_experts: int, num_rows: int, hidden_size: int) -> list[torch.Tensor]:
        """Garbage [L, C, H] and, with 8 bits, garbage scales, which lie column-major."""
        if not self.use_fp8:
            return [garbage((num_experts, num_rows, hidden_size), self.dtype)]
        data = garbage((num_experts, num_rows, hidden_size), torch.float8_e4m3fn)
        columns = (num_experts, self._num_scales(hidden_size), num_rows)
        return [data, garbage(columns, self._scale_dtype).transpose(1, 2)]


@dataclass(frozen=True)
class Received:
    """The result tensors of a dispatch, garbage until `fill`."""

    values: list[torch.Tensor]
    """[L, C, H], and scales."""
    counts: torch.Tensor
    """[L] int32."""
    src_info: torch.Tensor
    """[L, C] int32, the token of each row on its source rank."""
    layout_range: torch.Tensor
    """[L, R] int64, of each source rank the first row and, in the low 32 bits, their number."""

    @classmethod
    def new(cls, shape: Shape, num_ranks: int, transport: Transport) -> "Received":
        num_local, num_rows = shape.num_experts // num_ranks, num_ranks * shape.num_max_tokens
        return cls(
            transport.new_received(num_local, num_rows, shape.hidden_size),
            garbage((num_local,), torch.int32),
            garbage((num_local, num_rows), torch.int32),
            garbage((num_local, num_ranks), torch.int64),
        )

    def fill(
        self,
        indexes: torch.Tensor,
        values: list[torch.Tensor],
        sources: torch.Tensor,
        scrambler: Scrambler,
    ) -> None:
        """Lay out rows: `indexes` [n, 2] local expert and token, `values` [n, .], `sources` [n].

        Blocks of one source rank stay together; their order and the order inside them is random.
        """
        num_local, num_ranks = self.layout_range.shape
        experts = indexes[:, 0].long()
        places = scrambler.permutations(num_local, num_ranks)
        order = scrambler.order(experts * num_ranks + places[experts, sources])
        counts = torch.bincount(experts, minlength=num_local)
        experts = experts[order]
        slots = torch.arange(len(order)) - (counts.cumsum(0) - counts)[experts]
        for target, value in zip(self.values, values, strict=True):
            target[experts, slots] = value[order]
        self.src_info[experts, slots] = indexes[order, 1]
        self.counts.copy_(counts)
        self.layout_range.copy_(_layout_range(places, experts, sources[order]))


def _layout_range(
    places: torch.Tensor, experts: torch.Tensor, sources: torch.Tensor
) -> torch.Tensor:
    """[L, R] int64. `places` [L, R]: where the block of each source rank stands."""
    num_local, num_ranks = places.shape
    blocks = torch.bincount(experts * num_ranks + sources, minlength=places.numel())
    counts = blocks.view(num_local, num_ranks)
    stands_before = places[:, None, :] < places[:, :, None]
    begins = (stands_before * counts[:, None, :]).sum(dim=2)
    return begins << COUNT_BITS | counts


def rows_by_source(layout_range: torch.Tensor) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Rows for each source rank, and of each row, grouped by source rank, expert and slot."""
    num_local, num_ranks = layout_range.shape
    counts, begins = layout_range & COUNT_MASK, layout_range >> COUNT_BITS
    flat = counts.T.reshape(-1)
    experts = torch.arange(num_local).repeat(num_ranks).repeat_interleave(flat)
    first = (begins.T.reshape(-1) - (flat.cumsum(0) - flat)).repeat_interleave(flat)
    per_rank: list[int] = counts.sum(dim=0).tolist()
    return per_rank, experts, first + torch.arange(len(first))
