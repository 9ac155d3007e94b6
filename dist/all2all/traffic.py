"""How many rows a process sends to each other one: counted on the device, read by whoever asks.

Legend: R processes.
"""

from dataclasses import dataclass

import torch

from moed.dist.all2all.rows import RowLayout

# What a row's choices take beside its values: an id of 64 bits and a weight of 32.
CHOICE_BYTES = 12


@dataclass(frozen=True)
class Traffic:
    """Of one backend. What is sent in dispatch comes back in combine, row by row, as results."""

    rows_sent: torch.Tensor
    """[R] int64, on the device, counted up: rows sent to each process, the own one among them."""
    dispatch_row_bytes: int
    """Payload of a row on its way to the experts, without what a library adds."""
    combine_row_bytes: int
    """Of its result on the way back."""

    @classmethod
    def of_layout(cls, layout: RowLayout, num_ranks: int, device: torch.device) -> "Traffic":
        """Rows as `layout` has them, results in its dtype."""
        return cls(_zeros(num_ranks, device), layout.row_bytes, layout.hidden_bytes)

    @classmethod
    def of_rows(cls, row_bytes: int, top_k: int, num_ranks: int, device: torch.device) -> "Traffic":
        """Rows of `row_bytes` with the ids and weights of their choices beside them."""
        return cls(_zeros(num_ranks, device), row_bytes + top_k * CHOICE_BYTES, row_bytes)


def _zeros(num_ranks: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_ranks, dtype=torch.int64, device=device)
