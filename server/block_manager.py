"""Which KV blocks each request holds: plain numbers on the CPU, no tensors.

A block is `block_size` tokens of K and V in every layer. Full blocks are found again by the prefix
that they end (see `moed.server.prefix`) and shared: nobody ever writes into a full block.
"""

from moed.server.block_pool import BlockPool
from moed.server.prefix import extend_keys
from moed.server.request import Request


class BlockManager:
    """The pool of one rank's KV blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, shares_prefixes: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._shares_prefixes = shares_prefixes
        self._pool = BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that `request` lacks for all of its tokens so far."""
        return self.num_blocks_for(request.num_tokens) - len(request.block_ids)

    def find_prefix(self, request: Request) -> list[int]:
        """The blocks of a request that holds none, as far as others have computed them; its last
        token is always left to compute, since its logits are wanted.
        """
        if not self._shares_prefixes or not request.may_use_prefixes:
            return []
        self._extend_keys(request)
        found: list[int] = []
        for key in request.block_keys[: (request.num_tokens - 1) // self.block_size]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_needed_blocks(self, request: Request, prefix: list[int]) -> int:
        """Free blocks that `start` would take."""
        kept = sum(map(self._pool.is_kept, prefix))
        return self.num_missing_blocks(request) - len(prefix) + kept

    def start(self, request: Request, prefix: list[int]) -> None:
        """Give a request that holds nothing the blocks of its prefix, as computed, and new ones for
        all of its other tokens. The caller has checked that `num_needed_blocks` are free.
        """
        for block in prefix:
            self._pool.hold(block)
        request.block_ids.extend(prefix)
        request.num_named_blocks = len(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        self.allocate(request)

    def allocate(self, request: Request) -> None:
        """Give `request` blocks for all of its tokens so far. The caller has checked that
        `num_missing_blocks` are free.
        """
        missing = self.num_missing_blocks(request)
        assert missing <= self._pool.num_free, (missing, self._pool.num_free)
        for _ in range(missing):
            request.block_ids.append(self._pool.take())

    def name_blocks(self, request: Request, num_tokens: int) -> None:
        """Its first `num_tokens` tokens are in the cache by the time that this step's attention
        reads, so requests that come after it, in this step too, can share the full blocks.
        """
        num_full = num_tokens // self.block_size
        if num_full <= request.num_named_blocks or not self._shares_prefixes:
            return
        self._extend_keys(request)
        for index in range(request.num_named_blocks, num_full):
            self._pool.name(request.block_ids[index], request.block_keys[index])
        request.num_named_blocks = num_full

    def free(self, request: Request) -> None:
        """Take all of its blocks back. Safe for a request that holds none."""
        # The end of a prefix goes before its beginning, without which it could not be found.
        for block in reversed(request.block_ids):
            self._pool.release(block)
        del request.block_ids[:]
        request.num_computed_tokens = 0
        request.num_named_blocks = 0

    def forget(self, request: Request) -> None:
        """Nobody shall share what this request holds: it came out wrong."""
        for block in request.block_ids:
            self._pool.forget(block)

    def forget_prefixes(self) -> None:
        """What is in the cache now is found by nobody any more; running requests keep theirs."""
        self._pool.forget_all()

    def _extend_keys(self, request: Request) -> None:
        extend_keys(request.block_keys, request.cache_salt, request.token_ids, self.block_size)
