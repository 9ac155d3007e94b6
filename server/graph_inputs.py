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
        scrap_block: int,
        device: torch.device,
    ) -> None:
        num_rows = max(shape.num_rows for shape in shapes)
        num_blocks = max(shape.num_blocks for shape in shapes)
        self._block_size = block_size
        self._scrap_block = scrap_block
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slots = torch.full_like(self._token_ids, scrap_block * block_size)
        self._rows = torch.arange(num_rows, device=device)
        self._tables = torch.full(
            (num_rows, num_blocks), scrap_block, dtype=torch.int64, device=device
        )
        self._padding = torch.ones(num_rows, dtype=torch.bool, device=device)

    def padding(self, shape: GraphShape) -> torch.Tensor:
        """[b] bool: true for the rows that only fill up."""
        return self._padding[: shape.num_rows]

    def batch(self, shape: GraphShape) -> ForwardBatch:
        """The memory as a step of b decodes, with the logits of all rows. What the host knows of
        the contexts is their bound; where they end, `positions` say.
        """
        rows, blocks = shape.num_rows, shape.num_blocks
        return ForwardBatch(
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            slot_mapping=self._slots[:rows],
            query_lens=(1,) * rows,
            context_lens=(blocks * self._block_size,) * rows,
            block_tables=self._tables[:rows, :blocks],
            logits_indices=self._rows[:rows],
        )

    def fill(self, batch: ForwardBatch, shape: GraphShape) -> None:
        """Put the n decodes of `batch` in the first rows."""
        count, rows = batch.num_tokens, shape.num_rows
        for held, given, fill in (
            (self._token_ids, batch.token_ids, 0),
            (self._positions, batch.positions, 0),
            (self._slots, batch.slot_mapping, self._scrap_block * self._block_size),
        ):
            held[:count].copy_(given)
            held[count:rows].fill_(fill)
        self._padding[:count].fill_(False)
        self._padding[count:rows].fill_(True)
        tables = self._tables[:rows, : shape.num_blocks]
        # Also right of a request's own blocks, which are masked, but read.
        tables.fill_(self._scrap_block)
        # A request may hold more blocks than its context fills.
        width = min(shape.num_blocks, batch.block_tables.shape[1])
        tables[:count, :width].copy_(batch.block_tables[:, :width])
