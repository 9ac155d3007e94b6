"""Which CUDA graphs a rank records: pure functions of numbers that are the same on all ranks.

A graph is recorded for a number of rows (its bucket) and a width of the block tables. A decode step
replays the smallest that holds it; what none holds runs eagerly.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_GRAPH_ROWS = 512
"""A larger decode step keeps the GPU busy for longer than its launches take."""
MIN_GRAPH_TOKENS = 1024
"""Context that the narrowest graph holds."""
MAX_GRAPH_KV_ROWS = 2**18
"""Requests x context of one graph, where attention copies that much of the cache for each layer;
and of the requests of an eager step that decode together.
"""


@dataclass(frozen=True, order=True)
class GraphShape:
    """What a graph holds, or what a step needs; none of either for a step that runs eagerly."""

    num_rows: int
    """One token of each of so many requests."""
    num_blocks: int
    """Blocks of each."""

    def holds(self, other: "GraphShape") -> bool:
        return other.num_rows <= self.num_rows and other.num_blocks <= self.num_blocks


EAGER = GraphShape(0, 0)


def graph_buckets(max_num_rows: int) -> tuple[int, ...]:
    """Powers of two up to `max_num_rows`, and that itself, within `MAX_GRAPH_ROWS`."""
    largest = min(max_num_rows, MAX_GRAPH_ROWS)
    return (*_doubling(1, largest), largest)


def graph_widths(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Blocks of a request: from `MIN_GRAPH_TOKENS` tokens doubling up to `max_model_len`."""
    longest = -(-max_model_len // block_size)
    return (*_doubling(-(-MIN_GRAPH_TOKENS // block_size), longest), longest)


def graph_shapes(
    buckets: Iterable[int], max_model_len: int, block_size: int, copies_context: bool
) -> tuple[GraphShape, ...]:
    """All graphs, the largest first, so that the smaller ones find their memory used already.

    `copies_context`: attention copies each request's whole width for each layer, so widths matter
    and their product with the rows is bounded. Otherwise one width, the widest, serves all.
    """
    widths = graph_widths(max_model_len, block_size)
    if not copies_context:
        return tuple(sorted((GraphShape(rows, widths[-1]) for rows in buckets), reverse=True))
    most = MAX_GRAPH_KV_ROWS // block_size
    shapes = [
        GraphShape(rows, width) for rows in buckets for width in widths if rows * width <= most
    ]
    return tuple(sorted(shapes, reverse=True))


def smallest(shapes: Iterable[GraphShape], needed: GraphShape) -> GraphShape:
    """The one of `shapes` with the fewest rows, then blocks, that holds `needed`; `EAGER` if none
    does, or nothing is needed.
    """
    if needed == EAGER:
        return EAGER
    return min((shape for shape in shapes if shape.holds(needed)), default=EAGER)


def _doubling(start: int, below: int) -> Iterable[int]:
    while start < below:
        yield start
        start *= 2
