"""Which rank holds which expert: the one map that routing, loading and backends share.

Every rank has the same number of *slots*, and slot s lies on rank s // slots per rank. Backends
know slots alone. A slot holds a copy of one expert, or nobody's: then no token is ever sent there.
So counts that do not divide, redundant copies of hot experts and placements from a file are all one
map.

Legend: n rows, K top-k, E experts, R ranks, e slots of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from moed.config.engine_config import EngineConfig


@dataclass(frozen=True)
class ExpertPlacement:
    """`held[rank]` are the experts on `rank`, in the order of its slots."""

    held: tuple[tuple[int, ...], ...]
    num_experts: int
    is_sharded: bool = False
    """Expert parallelism is off: every rank holds a part of each expert instead of whole ones."""

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
        """e: the same on every rank, at least 1."""
        return max(1, *(len(experts) for experts in self.held))

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


class SlotMap:
    """A placement as tensors on one device: from expert ids, as the router gives them, to slots."""

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device) -> None:
        slots_of = placement.slots_of
        most = max(map(len, slots_of))
        # Copies of an expert are used in turn; rows are padded by going round.
        table = [[slots[copy % len(slots)] for copy in range(most)] for slots in slots_of]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._num_copies = torch.tensor([len(s) for s in slots_of], device=device)
        self._rank = rank
        self._has_copies = placement.has_copies
        self._is_identity = [row[0] for row in table] == list(range(placement.num_experts))

    def to_slots(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """[n, K] int64 slots for `expert_ids` [n, K]; -1 stays -1.

        Which copy a row uses follows from its place in the step and from its rank, so that copies
        share the rows; their weights are the same, and so are the results.
        """
        if self._is_identity and not self._has_copies:
            return expert_ids
        known = expert_ids.clamp(min=0)
        if not self._has_copies:
            slots = self._table[known, 0]
        else:
            turn = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] + self._rank
            slots = self._table[known, turn % self._num_copies[known]]
        return torch.where(expert_ids >= 0, slots, -1)


def local_slots(
    slot_ids: torch.Tensor, placement: ExpertPlacement, rank: int | torch.Tensor
) -> torch.Tensor:
    """For `slot_ids` [n, K]: the slot's number on `rank`, -1 for slots of other ranks and id -1.

    `rank` is one rank, or one for each row, [n, 1].
    """
    if placement.is_sharded:
        return slot_ids
    local = slot_ids - rank * placement.num_local_slots
    is_here = (slot_ids >= 0) & (local >= 0) & (local < placement.num_local_slots)
    return torch.where(is_here, local, -1)


def place_experts(config: EngineConfig) -> ExpertPlacement:
    """Where the experts of `config` lie."""
    num_experts, num_ranks = config.model.num_experts, config.parallel.world_size
    if not config.parallel.enable_expert_parallel:
        return ExpertPlacement.sharded(num_experts, num_ranks)
    return ExpertPlacement.linear(num_experts, num_ranks)


def parse_placement(
    lists: Sequence[Sequence[int]], num_experts: int, num_ranks: int
) -> ExpertPlacement:
    """A placement from lists of expert ids, one for each rank. Raises `ValueError` when they do not
    fit the model or the launch.
    """
    if len(lists) != num_ranks:
        raise ValueError(f"it places experts on {len(lists)} ranks, and there are {num_ranks}")
    return ExpertPlacement(tuple(tuple(experts) for experts in lists), num_experts)
