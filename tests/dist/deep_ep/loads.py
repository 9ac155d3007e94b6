"""Rows of every kind for the stand-in's tests, experts for them, and what must come home.

T own tokens, H hidden size, K experts of a token, E experts.
"""

import dataclasses
from collections.abc import Callable

import torch

from moed.dist.deep_ep.rules import ContractViolation

K = 3


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one rank sends: `hidden` [T, H], `ids` [T, K] int64, `weights` [T, K] float32."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Load:
    """One call on all ranks."""

    num_max_tokens: int
    num_experts: int
    rows_by_rank: list[Rows]

    @property
    def hidden_size(self) -> int:
        return self.rows_by_rank[0].hidden.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_by_rank[0].hidden.dtype

    def num_local(self) -> int:
        return self.num_experts // len(self.rows_by_rank)


def random_rows(
    num_tokens: int, hidden_size: int, num_experts: int, dtype: torch.dtype, seed: int
) -> Rows:
    """Distinct ids in random order; every fifth is -1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :K].clone()
    ids.view(-1)[4::5] = -1
    return Rows(hidden, ids, torch.rand(num_tokens, K, generator=generator))


def make_load(
    sizes: list[int],
    num_max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Load:
    """`sizes`: tokens of each rank. Four experts on a rank."""
    num_experts = 4 * len(sizes)
    rows_by_rank = [
        random_rows(size, hidden_size, num_experts, dtype, seed=10 * rank + size)
        for rank, size in enumerate(sizes)
    ]
    if change is not None:
        rows_by_rank = [
            dataclasses.replace(rows, ids=change(rows.ids.clone())) for rows in rows_by_rank
        ]
    return Load(num_max_tokens, num_experts, rows_by_rank)


def to_last_expert(ids: torch.Tensor) -> torch.Tensor:
    """Of an R = 1 model and of larger ones: expert 3, once for each token."""
    ids[:] = -1
    ids[:, 1] = 3
    return ids


# Tokens of each of up to four ranks, and what is done to ids; N is 8.
LOADS: dict[str, tuple[list[int], Callable[[torch.Tensor], torch.Tensor] | None]] = {
    "ragged": ([3, 5, 1, 2], None),
    "full": ([8, 8, 8, 8], None),
    "first_sends_none": ([0, 8, 1, 4], None),
    "only_last_sends": ([0, 0, 0, 7], None),
    "nobody_sends": ([0, 0, 0, 0], None),
    "only_padding": ([4, 3, 0, 2], lambda ids: torch.full_like(ids, -1)),
    "one_expert": ([8, 7, 8, 8], to_last_expert),
}


def load_of(name: str, world_size: int, hidden_size: int, dtype: torch.dtype) -> Load:
    """One of `LOADS` for so many ranks; the last of them counts as the last."""
    sizes, change = LOADS[name]
    return make_load([*sizes[: world_size - 1], sizes[-1]], 8, hidden_size, dtype, change)


def expert(index: int, hidden_size: int) -> torch.Tensor:
    """[H] float32, what expert `index` multiplies a row by."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(hidden_size, generator=generator)


def apply_expert(rows: torch.Tensor, index: int) -> torch.Tensor:
    """[n, H] in the dtype of `rows`."""
    return (rows.float() * expert(index, rows.shape[1])).to(rows.dtype)


def weighted_in_home(load: Load, rank: int) -> torch.Tensor:
    """[T, H]: weights at the sender, in float32 and in the order of choices: low latency."""
    rows = load.rows_by_rank[rank]
    total = torch.zeros(rows.hidden.shape)
    for token, choice in (rows.ids >= 0).nonzero().tolist():
        output = apply_expert(rows.hidden[token][None], int(rows.ids[token, choice]))[0]
        total[token] += rows.weights[token, choice] * output.float()
    return total.to(load.dtype)


def weighted_at_experts(load: Load, rank: int) -> torch.Tensor:
    """[T, H]: each rank sums its weighted experts in float32 and rounds; then ranks are summed."""
    rows = load.rows_by_rank[rank]
    total = torch.zeros(rows.hidden.shape)
    for owner in range(len(load.rows_by_rank)):
        part = torch.zeros_like(total)
        for token, choice in (rows.ids >= 0).nonzero().tolist():
            index = int(rows.ids[token, choice])
            if index // load.num_local() == owner:
                output = apply_expert(rows.hidden[token][None], index)[0]
                part[token] += rows.weights[token, choice] * output.float()
        total += part.to(load.dtype).float()
    return total.to(load.dtype)


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with; empty when it is not."""
    try:
        call()
    except ContractViolation as error:
        return str(error)
    return ""
