"""Which part of a dimension a process holds, where several share one tensor."""

from dataclasses import dataclass

from moed.config.expert_placement import ExpertPlacement


@dataclass(frozen=True)
class Shard:
    """`start` to `stop` of a dimension of `whole`."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def even_shard(whole: int, num_parts: int, part: int) -> Shard:
    """Contiguous shares; when they do not divide, the first are one larger."""
    share, extra = divmod(whole, num_parts)
    start = part * share + min(part, extra)
    return Shard(start, start + share + (part < extra), whole)


def head_shard(num_heads: int, head_dim: int, num_parts: int, part: int) -> Shard:
    """Rows of whole heads. With fewer heads than parts, neighbours hold the same one: then
    `num_parts` must be a multiple of `num_heads`, as else `num_heads` of `num_parts`.
    """
    if num_heads < num_parts:
        first, count = part * num_heads // num_parts, 1
    else:
        count = num_heads // num_parts
        first = part * count
    return Shard(first * head_dim, (first + count) * head_dim, num_heads * head_dim)


def shard_of(intermediate_size: int, placement: ExpertPlacement, rank: int) -> Shard:
    """The part of each expert's intermediate dimension on `rank`: all of it, unless experts are
    sharded.
    """
    if not placement.is_sharded:
        return Shard(0, intermediate_size, intermediate_size)
    return even_shard(intermediate_size, placement.num_ranks, rank)
