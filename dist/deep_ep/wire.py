"""How the stand-in moves rows: two collectives for a call, whatever its rows.

The first carries one record of fixed size to every rank: which call this is, its sizes, and how
many rows follow. A mismatch is seen by all ranks, and raises on all of them, before the second
collective, which carries the rows.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from moed.dist.deep_ep.rules import ContractViolation, Shape

ALIGNMENT_BYTES = 8
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""[T, H], or 8-bit values [T, H] and their scales [T, .]; how DeepEP's callers pass rows."""


def joined(values: list[torch.Tensor]) -> Rows:
    """`Rows` of [T, H] alone, or with scales."""
    return values[0] if len(values) == 1 else (values[0], values[1])


class Call(IntEnum):
    """The collective calls."""

    BUFFER = 0
    DESTROY = 1
    LOW_LATENCY_DISPATCH = 2
    LOW_LATENCY_COMBINE = 3
    CLEAN_LOW_LATENCY_BUFFER = 4
    DISPATCH = 5
    COMBINE = 6


@dataclass(frozen=True)
class _Record:
    """What all ranks must have in common for a call."""

    call: int
    number: int
    """Calls made before on this buffer."""
    num_max_tokens: int
    num_experts: int
    hidden_size: int
    top_k: int
    form: int
    """Whatever else has to agree, as one number."""

    def __str__(self) -> str:
        return (
            f"{Call(self.call).name.lower()}, call {self.number} of the buffer, with N "
            f"{self.num_max_tokens}, E {self.num_experts}, H {self.hidden_size}, K {self.top_k}, "
            f"form {self.form}"
        )


class Wire:
    """The group of one buffer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._num_calls = 0

    def announce(
        self, call: Call, shape: Shape, form: int, send_counts: Sequence[int] | None = None
    ) -> list[int]:
        """Tell every rank what is being called; rows that each of them will send here.

        Collective. `send_counts`: rows for each rank, None for none. Raises `ContractViolation` on
        all ranks when they call different things.
        """
        record = _Record(
            call,
            self._num_calls,
            shape.num_max_tokens,
            shape.num_experts,
            shape.hidden_size,
            shape.top_k,
            form,
        )
        self._num_calls += 1
        own = torch.tensor([*astuple(record), 0]).repeat(self.num_ranks, 1)
        if send_counts is not None:
            own[:, -1] = torch.tensor(send_counts)
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own, group=self.group)
        records = [_Record(*values) for values in received[:, :-1].tolist()]
        if any(other != records[0] for other in records):
            told = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(records))
            raise ContractViolation(f"ranks make different calls, and would hang. {told}")
        counts: list[int] = received[:, -1].tolist()
        return counts

    def exchange(
        self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> torch.Tensor:
        """Rows [sum of counts, bytes] uint8, grouped by rank. Collective."""
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        dist.all_to_all_single(received, rows, receive_counts, send_counts, group=self.group)
        return received

    def sources(self, receive_counts: list[int]) -> torch.Tensor:
        """[rows] int64: the rank that each received row came from."""
        return torch.arange(self.num_ranks).repeat_interleave(torch.tensor(receive_counts))


@dataclass(frozen=True)
class RowFormat:
    """Parts of a row side by side, as bytes; `parts` are (dtype, width)."""

    parts: tuple[tuple[torch.dtype, int], ...]

    def _sizes(self) -> list[int]:
        return [dtype.itemsize * width for dtype, width in self.parts]

    def pack(self, *tensors: torch.Tensor) -> torch.Tensor:
        """[n, bytes] uint8 from one [n, width] tensor for each part."""
        sizes = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in self._sizes()]
        rows = torch.zeros(tensors[0].shape[0], sum(sizes), dtype=torch.uint8)
        start = 0
        for tensor, (dtype, _), size in zip(tensors, self.parts, sizes, strict=True):
            # New memory: one column may lie with a stride of 0, which no other dtype can view.
            plain = torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)
            part = plain.view(torch.uint8)
            rows[:, start : start + part.shape[1]] = part
            start += size
        return rows

    def unpack(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack`."""
        tensors, start = [], 0
        for (dtype, _), size in zip(self.parts, self._sizes(), strict=True):
            tensors.append(rows[:, start : start + size].contiguous().view(dtype))
            start += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tensors


class Scrambler:
    """Random orders of its own, so that nobody relies on the order in which rows arrive.

    It leaves torch's global random numbers alone, which a model may have seeded.
    """

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(20_000 + rank)

    def order(self, keys: torch.Tensor) -> torch.Tensor:
        """[n] int64: a permutation that sorts `keys` [n], random among equal ones."""
        shuffled = torch.randperm(keys.shape[0], generator=self._generator)
        return shuffled[keys[shuffled].argsort(stable=True)]

    def permutations(self, num_rows: int, size: int) -> torch.Tensor:
        """[num_rows, size] int64: in each row another permutation of 0..size - 1."""
        return torch.rand(num_rows, size, generator=self._generator).argsort(dim=1)
