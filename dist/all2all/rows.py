"""Rows on the wire: hidden values, expert ids and weights of a row side by side, as bytes.

One buffer means one collective. A row is D values of the model's dtype, then K int32 local expert
ids, then K float32 weights, each part padded to 8 bytes so that views stay aligned.
"""

from dataclasses import dataclass

import torch

ALIGNMENT = 8


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RowLayout:
    """Offsets of the parts of a row."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    @property
    def ids_offset(self) -> int:
        return _aligned(self.hidden_bytes)

    @property
    def weights_offset(self) -> int:
        return self.ids_offset + _aligned(4 * self.top_k)

    @property
    def row_bytes(self) -> int:
        return self.weights_offset + _aligned(4 * self.top_k)

    def empty(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """[num_rows, row_bytes] uint8."""
        return torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=device)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """View [n, D] of the hidden part."""
        return rows[:, : self.hidden_bytes].view(self.dtype)

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """View [n, K] int32."""
        return rows[:, self.ids_offset : self.ids_offset + 4 * self.top_k].view(torch.int32)

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """View [n, K] float32."""
        return rows[:, self.weights_offset : self.weights_offset + 4 * self.top_k].view(
            torch.float32
        )


def going_to(ranks: torch.Tensor, topk_ids: torch.Tensor, num_local_slots: int) -> torch.Tensor:
    """[R, n] bool for `ranks` [R] and the slots `topk_ids` [n, K], -1 for none: which rows have a
    choice on which rank.
    """
    destinations = torch.div(topk_ids, num_local_slots, rounding_mode="floor")
    return (destinations[None] == ranks[:, None, None]).any(dim=-1)


def sum_parts(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Sum tensors of one shape in list order, in float32, cast to the dtype of `like`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(like.dtype)
