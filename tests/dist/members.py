"""Tensor-parallel groups among the processes of a worker pool."""

import copy

import torch.distributed as dist

from moed.dist.groups import Groups


def with_members(groups: Groups, tensor_parallel_size: int) -> Groups:
    """The same processes, split into groups of members. Collective."""
    size = tensor_parallel_size
    split = copy.copy(groups)
    split.tensor_size = size
    split.tensor_rank, split.data_parallel_rank = groups.rank % size, groups.rank // size
    for first in range(0, groups.world_size if size > 1 else 0, size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        if groups.rank in members:
            split.tensor = group
    return split
