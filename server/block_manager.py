"""Which KV blocks each request holds: plain numbers on the CPU, no tensors.

A block is `block_size` tokens of K and V in every layer. Full blocks are found again by the prefix
that they end (see `moed.server.prefix`) and shared: nobody ever writes into a full block.
"""

from dataclasses import dataclass

from moed.server.block_pool import BlockPool
from moed.server.prefix import extend_keys
from moed.server.request import Request
from moed.server.window_blocks import WindowBlocks


@dataclass(frozen=True)
class Prefix:
    """Blocks that others have computed and a request can begin with."""

    block_ids: list[int]
    window_block_ids: list[int]
    """The last ones, of the layers that slide."""


NO_PREFIX = Prefix([], [])


class BlockManager:
    """The pool of one rank's KV blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        shares_prefixes: bool,
        window_blocks: WindowBlocks | None = None,
    ) -> None:
        """`window_blocks`: of a model where only some layers slide."""
        self.window_blocks = window_blocks
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

    def find_prefix(self, request: Request) -> Prefix:
        """The blocks of a request that holds none, as far as others have computed them; its last
        token is always left to compute, since its logits are wanted.
        """
        if not self._shares_prefixes or not request.may_use_prefixes:
            return NO_PREFIX
        self._extend_keys(request)
        found: list[int] = []
        keys = request.block_keys[: (request.num_tokens - 1) // self.block_size]
        for key in keys:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        if self.window_blocks is None:
            return Prefix(found, [])
        num_blocks, last = self.window_blocks.find_last(keys[: len(found)])
        return Prefix(found[:num_blocks], last)

    def num_needed_blocks(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that `start` would take."""
        kept = sum(map(self._pool.is_kept, prefix.block_ids))
        return self.num_missing_blocks(request) - len(prefix.block_ids) + kept

    def start(self, request: Request, prefix: Prefix) -> None:
        """Give a request that holds nothing the blocks of its prefix, as computed, and new ones for
        all of its other tokens. The caller has checked that `num_needed_blocks` are free.
        """
        for block in prefix.block_ids:
            self._pool.hold(block)
        request.block_ids.extend(prefix.block_ids)
        request.num_named_blocks = len(prefix.block_ids)
        request.num_computed_tokens = len(prefix.block_ids) * self.block_size
        if self.window_blocks is not None:
            self.window_blocks.start(request, prefix.window_block_ids)
        self.allocate(request)

    def allocate(self, request: Request) -> None:
        """Give `request` blocks for all of its tokens so far. The caller has checked that
        `num_missing_blocks` are free.
        """
        missing = self.num_missing_blocks(request)
        assert missing <= self._pool.num_free, (missing, self._pool.num_free)
        for _ in range(missing):
            request.block_ids.append(self._pool.take())

    def take_step(self, request: Request, num_tokens: int) -> None:
        """Its first `num_tokens` tokens are in the cache by the time that this step's attention
        reads, so requests that come after it, in this step too, can share the full blocks.
        """
        if self.window_blocks is not None:
            self.window_blocks.extend(request, num_tokens)
        self.name_full(request, num_tokens)

    def name_full(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of its first `num_tokens` tokens, as far as these are
        known here.
        """
        num_full = min(num_tokens, len(request.token_ids)) // self.block_size
        if num_full <= request.num_named_blocks or not self._shares_prefixes:
            return
        self._extend_keys(request)
        for index in range(request.num_named_blocks, num_full):
            self._pool.name(request.block_ids[index], request.block_keys[index])
            if self.window_blocks is not None:
                self.window_blocks.name(request, index, request.block_keys[index])
        request.num_named_blocks = num_full

    def end_step(self, request: Request) -> None:
        """Its `num_computed_tokens` have grown."""
        if self.window_blocks is not None:
            self.window_blocks.drop_unseen(request)

    def free(self, request: Request) -> None:
        """Take all of its blocks back. Safe for a request that holds none."""
        # The end of a prefix goes before its beginning, without which it could not be found.
        for block in reversed(request.block_ids):
            self._pool.release(block)
        del request.block_ids[:]
        if self.window_blocks is not None:
            self.window_blocks.free(request)
        request.num_computed_tokens = 0
        request.num_named_blocks = 0

    def forget(self, request: Request) -> None:
        """Nobody shall share what this request holds, or has held before a preemption: it came out
        wrong.
        """
        for key in request.block_keys:
            self._pool.forget(key)
            if self.window_blocks is not None:
                self.window_blocks.forget(key)

    def forget_prefixes(self) -> None:
        """What is in the cache now is found by nobody any more; running requests keep theirs."""
        self._pool.forget_all()
        if self.window_blocks is not None:
            self.window_blocks.forget_prefixes()

    def _extend_keys(self, request: Request) -> None:
        extend_keys(request.block_keys, request.cache_salt, request.token_ids, self.block_size)
