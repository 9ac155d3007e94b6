"""A placement of experts as tensors: from expert ids, as the router gives them, to slots.

Legend: n rows, K top-k.
"""

import torch

from moed.config.expert_placement import ExpertPlacement


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
