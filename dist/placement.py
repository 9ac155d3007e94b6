"""Which rank holds which expert: the one map that routing, loading and backends share."""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ExpertPlacement:
    """`ranks[e]` is the rank that holds global expert e; local ids follow global order."""

    ranks: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not self.ranks:
            raise ValueError(
                f"{len(self.ranks)} experts on {self.num_ranks} ranks: both must be at least 1"
            )
        if not all(0 <= rank < self.num_ranks for rank in self.ranks):
            raise ValueError(f"ranks {self.ranks} must lie in 0..{self.num_ranks - 1}")

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Contiguous shares; when they do not divide, the first ranks hold one more. With fewer
        experts than ranks the last ranks hold none.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}: it must be at least 1")
        share, extra = divmod(num_experts, num_ranks)
        counts = [share + (rank < extra) for rank in range(num_ranks)]
        return cls(
            tuple(rank for rank, count in enumerate(counts) for _ in range(count)), num_ranks
        )

    @property
    def num_experts(self) -> int:
        return len(self.ranks)

    def local_expert_ids(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts on `rank`, in local order."""
        return tuple(expert for expert, owner in enumerate(self.ranks) if owner == rank)

    def num_local(self, rank: int) -> int:
        return self.ranks.count(rank)

    @cached_property
    def rank_of(self) -> torch.Tensor:
        """[num_experts] int64."""
        return torch.tensor(self.ranks, dtype=torch.int64)

    @cached_property
    def local_of(self) -> torch.Tensor:
        """[num_experts] int64, the local id of each expert on its rank."""
        local = torch.empty(self.num_experts, dtype=torch.int64)
        for rank in range(self.num_ranks):
            ids = self.local_expert_ids(rank)
            local[list(ids)] = torch.arange(len(ids))
        return local
