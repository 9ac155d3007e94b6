"""The memory that recorded decode steps read, filled anew before each replay.

Legend: b rows of a graph, W blocks of its tables, n real rows of a step (0 <= n <= b).
"""

from collections.abc import Sequence

import torch

from moed.config.graphs import GraphShape
from moed.moe.batch import ForwardBatch


class GraphInputs:
    """Of the largest graph; the others use a part. A row that only fills up a graph is token 0 at
    position 0 of a request in the scrap block, a block that no request ever holds, so its K and V
    are nobody's.
    """

    def __init__(
        self,
        shapes: Sequence[GraphShape],
        block_size: int,
        scrap_blocks: tuple[int, int | None],
        device: torch.device,
    ) -> None:
        """`scrap_blocks`: the scrap block, and that of the layers that slide where they have blocks
        of their own.
        """
        num_rows = max(shape.num_rows for shape in shapes)
        num_blocks = max(shape.num_blocks for shape in shapes)
        self._block_size = block_size
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._rows = torch.arange(num_rows, device=device)
        whole, window = scrap_blocks
        self._places = _Places(num_rows, num_blocks, block_size, whole, device)
        self._window_places = None
        if window is not None:
            self._window_places = _Places(num_rows, num_blocks, block_size, window, device)
        self._padding = torch.ones(num_rows, dtype=torch.bool, device=device)

    def padding(self, shape: GraphShape) -> torch.Tensor:
        """[b] bool: true for the rows that only fill up."""
        return self._padding[: shape.num_rows]

    def batch(self, shape: GraphShape) -> ForwardBatch:
        """The memory as a step of b decodes, with the logits of all rows. What the host knows of
        the contexts is their bound; where they end, `positions` say.
        """
        rows, blocks, window = shape.num_rows, shape.num_blocks, self._window_places
        return ForwardBatch(
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            slot_mapping=self._places.slots[:rows],
            query_lens=(1,) * rows,
            context_lens=(blocks * self._block_size,) * rows,
            block_tables=self._places.tables[:rows, :blocks],
            logits_indices=self._rows[:rows],
            window_slot_mapping=None if window is None else window.slots[:rows],
            window_block_tables=None if window is None else window.tables[:rows, :blocks],
        )

    def fill(self, batch: ForwardBatch, shape: GraphShape) -> None:
        """Put the n decodes of `batch` in the first rows."""
        count, rows = batch.num_tokens, shape.num_rows
        for held, given in (
            (self._token_ids, batch.token_ids),
            (self._positions, batch.positions),
        ):
            held[:count].copy_(given)
            held[count:rows].fill_(0)
        self._padding[:count].fill_(False)
        self._padding[count:rows].fill_(True)
        self._places.fill(shape, batch.slot_mapping, batch.block_tables)
        slots, tables = batch.window_slot_mapping, batch.window_block_tables
        if self._window_places is not None and slots is not None and tables is not None:
            self._window_places.fill(shape, slots, tables)


class _Places:
    """Where K and V of the rows are written, and where those before them lie."""

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        scrap_block: int,
        device: torch.device,
    ) -> None:
        self._scrap_block = scrap_block
        self._scrap_slot = scrap_block * block_size
        self.slots = torch.full((num_rows,), self._scrap_slot, dtype=torch.int64, device=device)
        shape = (num_rows, num_blocks)
        self.tables = torch.full(shape, scrap_block, dtype=torch.int64, device=device)

    def fill(self, shape: GraphShape, slots: torch.Tensor, tables: torch.Tensor) -> None:
        count, rows = len(slots), shape.num_rows
        self.slots[:count].copy_(slots)
        self.slots[count:rows].fill_(self._scrap_slot)
        held = self.tables[:rows, : shape.num_blocks]
        # Also right of a request's own blocks, which are masked, but read.
        held.fill_(self._scrap_block)
        # A request may hold more blocks than its context fills.
        width = min(shape.num_blocks, tables.shape[1])
        held[:count, :width].copy_(tables[:, :width])
