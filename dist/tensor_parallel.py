"""The members of one tensor-parallel group: sums of their parts, and shares of their rows.

Legend: n rows of the DP rank, T members, c = ceil(n / T) rows of a member.
"""

import torch
import torch.distributed as dist

from moed.dist.groups import Groups, collective_errors


class TensorParallel:
    """Collectives between the processes of one DP rank; with one member they cost nothing.

    All members hold the same rows. In attention and dense MLPs each computes a part of every row
    and `sum` adds the parts; around a MoE layer each takes a `share` of the rows and `gather` joins
    them.
    """

    def __init__(self, groups: Groups) -> None:
        self.size = groups.tensor_size
        self.rank = groups.tensor_rank
        self._group = groups.tensor

    def join(self, groups: Groups) -> None:
        """Go on in a new group, of the same shape."""
        self._group = groups.tensor

    @property
    def is_first(self) -> bool:
        """True on the member that adds what must be added once, such as biases."""
        return self.rank == 0

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all members' `part`, of any one shape. In place. One collective for T > 1."""
        if self.size > 1:
            with collective_errors("sum over tensor-parallel members"):
                dist.all_reduce(part, group=self._group)
        return part

    def share(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """This member's c of `rows` [n, ...]; the last members' are filled up with `fill`."""
        if self.size == 1:
            return rows
        count = -(-rows.shape[0] // self.size)
        own = rows[self.rank * count : (self.rank + 1) * count]
        if own.shape[0] == count:
            return own
        padded = rows.new_full((count, *rows.shape[1:]), fill)
        padded[: own.shape[0]] = own
        return padded

    def gather(self, own: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[n, ...] from every member's `own` [c, ...], without what was filled up. One collective
        for T > 1.
        """
        if self.size == 1:
            return own
        whole = own.new_empty((self.size * own.shape[0], *own.shape[1:]))
        with collective_errors("gather over tensor-parallel members"):
            dist.all_gather_single(whole, own.contiguous(), group=self._group)
        return whole[:num_rows]
