"""KV blocks of the layers with a window, in models where others see the whole context.

A request holds those that its next tokens can see, under the same places as its other blocks; the
places before are 0. The pool is large enough for all that may run (`config.kv_layout`), so that
nothing ever waits for a block of it.
"""

from moed.config.windows import Window
from moed.server.block_pool import BlockPool
from moed.server.request import Request

# Stands at places that nobody reads any more: any block that exists would do.
GONE = 0


class WindowBlocks:
    """Of one rank. The block manager calls it beside its own pool."""

    def __init__(self, num_blocks: int, window: Window, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._window = window
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._pool.num_free

    def find_last(self, keys: list[bytes]) -> tuple[int, list[int]]:
        """How many of the first blocks named by `keys` can be gone on from, and the blocks that the
        tokens after them can see.
        """
        seen: list[int] = []
        # From the end: the longest prefix whose last blocks are all here.
        for place in range(len(keys) - 1, -1, -1):
            if not seen:
                num_blocks = place + 1
                first = self._first_seen(num_blocks * self._block_size)
                if first > place:
                    return num_blocks, []
            block = self._pool.find(keys[place])
            if block is None:
                seen.clear()
                continue
            seen.append(block)
            if place == first:
                return num_blocks, seen[::-1]
        return 0, []

    def start(self, request: Request, blocks: list[int]) -> None:
        """Hold what `find_last` found, for a request that has as many `block_ids` computed."""
        for block in blocks:
            self._pool.hold(block)
        gone = request.num_computed_tokens // self._block_size - len(blocks)
        request.window_block_ids.extend([GONE] * gone + blocks)
        request.num_gone_blocks = gone

    def extend(self, request: Request, num_tokens: int) -> None:
        """Blocks for its first `num_tokens` tokens."""
        missing = -(-num_tokens // self._block_size) - len(request.window_block_ids)
        for _ in range(missing):
            request.window_block_ids.append(self._pool.take())

    def name(self, request: Request, place: int, key: bytes) -> None:
        if place < request.num_gone_blocks:
            return
        self._pool.name(request.window_block_ids[place], key)

    def drop_unseen(self, request: Request) -> None:
        """Give back what no token after those that are computed can see."""
        first = self._first_seen(request.num_computed_tokens)
        for place in range(request.num_gone_blocks, first):
            self._pool.release(request.window_block_ids[place])
            request.window_block_ids[place] = GONE
        request.num_gone_blocks = max(first, request.num_gone_blocks)

    def free(self, request: Request) -> None:
        for block in reversed(request.window_block_ids[request.num_gone_blocks :]):
            self._pool.release(block)
        del request.window_block_ids[:]
        request.num_gone_blocks = 0

    def forget(self, key: bytes) -> None:
        self._pool.forget(key)

    def forget_prefixes(self) -> None:
        self._pool.forget_all()

    def _first_seen(self, num_tokens: int) -> int:
        """The place of the first block that the token after `num_tokens` others can see."""
        return max(0, self._window.first_seen(num_tokens)) // self._block_size
