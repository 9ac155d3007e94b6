"""Which rank holds which expert: the one map that routing, loading and backends share.

Every rank has the same number of *slots*, and slot s lies on rank s // slots per rank. Backends
know slots alone. A slot holds a copy of one expert, or nobody's: then no token is ever sent there.
So counts that do not divide, redundant copies of hot experts and placements from a file are all one
map.

Legend: E experts, R ranks, e slots of one rank.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ExpertPlacement:
    """`held[rank]` are the experts on `rank`, in the order of its slots."""

    held: tuple[tuple[int, ...], ...]
    num_experts: int
    is_sharded: bool = False
    """Expert parallelism is off: every rank holds a part of each expert instead of whole ones."""
    least_local_slots: int = 1
    """Slots of each rank, at least: all layers have the same number."""

    def __post_init__(self) -> None:
        if not self.held or self.num_experts < 1:
            raise ValueError(
                f"{self.num_experts} experts on {len(self.held)} ranks: both must be at least 1"
            )
        for rank, experts in enumerate(self.held):
            if unknown := [e for e in experts if not 0 <= e < self.num_experts]:
                raise ValueError(
                    f"rank {rank} holds expert {unknown[0]}: they are 0..{self.num_experts - 1}"
                )
            if len(set(experts)) < len(experts):
                raise ValueError(f"rank {rank} holds an expert twice: {list(experts)}")
        found = {expert for experts in self.held for expert in experts}
        if missing := sorted(set(range(self.num_experts)) - found):
            raise ValueError(f"no rank holds expert {missing[0]}")

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Contiguous shares; when they do not divide, the first ranks hold one more. With fewer
        experts than ranks the last ranks hold none.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}: it must be at least 1")
        share, extra = divmod(num_experts, num_ranks)
        bounds = [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]
        held = (tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(num_ranks))
        return cls(tuple(held), num_experts)

    @classmethod
    def sharded(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Every rank holds its part of every expert."""
        return cls((tuple(range(num_experts)),) * num_ranks, num_experts, is_sharded=True)

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    @cached_property
    def num_local_slots(self) -> int:
        """e: the same on every rank."""
        return max(self.least_local_slots, *(len(experts) for experts in self.held))

    @property
    def num_slots(self) -> int:
        """R x e; when sharded e, since all ranks have the same ones."""
        return self.num_local_slots * (1 if self.is_sharded else self.num_ranks)

    def local_expert_ids(self, rank: int) -> tuple[int, ...]:
        """The experts on `rank`, by slot."""
        return self.held[rank]

    def num_local(self, rank: int) -> int:
        return len(self.held[rank])

    @cached_property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """By expert: all slots that hold a copy, by rank."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.held[: 1 if self.is_sharded else None]):
            for local, expert in enumerate(experts):
                slots[expert].append(rank * self.num_local_slots + local)
        return tuple(map(tuple, slots))

    @cached_property
    def has_copies(self) -> bool:
        return any(len(slots) > 1 for slots in self.slots_of)
