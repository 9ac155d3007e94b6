"""Which KV blocks each request holds: plain numbers on the CPU, no tensors.

A block is `block_size` tokens of K and V in every layer, and belongs to one request or to nobody.
"""

from moed.server.request import Request


class BlockManager:
    """The pool of one rank's KV blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is used first, while it may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that `request` lacks for all of its tokens so far."""
        return self.num_blocks_for(request.num_tokens) - len(request.block_ids)

    def allocate(self, request: Request) -> None:
        """Give `request` blocks for all of its tokens so far. The caller has checked that
        `num_missing_blocks` are free.
        """
        missing = self.num_missing_blocks(request)
        assert missing <= len(self._free), (missing, len(self._free))
        for _ in range(missing):
            request.block_ids.append(self._free.pop())

    def free(self, request: Request) -> None:
        """Take all of its blocks back. Safe for a request that holds none."""
        self._free.extend(reversed(request.block_ids))
        del request.block_ids[:]
        request.num_computed_tokens = 0
