"""Which rank gets a request: the one where the least work in tokens lies before its end, ties to
the one longest unused.

Loads are counted here, at the moment of choosing, and never copied from a report that a rank made
earlier: a burst spreads evenly although no rank has answered yet. What a rank has computed of the
prompt before, and should still hold, is no work there: requests with a common beginning meet on one
rank until its lead in other work outweighs the beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moed.server.prefix import PrefixMemory

# How much of `max_tokens` counts as work to come. Most outputs end long before a large limit, and
# one request with a limit of 100k tokens must not keep a rank empty.
EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True)
class Work:
    """What a new request asks for."""

    num_prompt_tokens: int
    max_tokens: int
    block_keys: Sequence[bytes] = ()
    """Of the full blocks of its prompt that may be shared."""
    block_size: int = 1

    @property
    def num_expected_tokens(self) -> int:
        """Output tokens that count as work."""
        return min(self.max_tokens, EXPECTED_OUTPUT_TOKENS)


@dataclass(frozen=True)
class Placed:
    """Where a request went, and the tokens counted for it there."""

    rank: int
    num_prefill_tokens: int
    num_expected_tokens: int

    @property
    def load(self) -> int:
        return self.num_prefill_tokens + self.num_expected_tokens


class Balancer:
    """Work of each rank in tokens: added when a request is given, taken off as it is done."""

    def __init__(self, num_ranks: int) -> None:
        self.loads = [0] * num_ranks
        self._prefixes = [PrefixMemory(0) for _ in range(num_ranks)]
        self._last_used = [0] * num_ranks
        self._num_choices = 0

    @property
    def num_ranks(self) -> int:
        return len(self.loads)

    def remember_blocks(self, num_blocks: int) -> None:
        """How many blocks a rank holds, and so may be expected to know again."""
        for memory in self._prefixes:
            memory.capacity = num_blocks

    def forget_prefixes(self) -> None:
        for memory in self._prefixes:
            memory.clear()

    def start_anew(self) -> None:
        """The ranks have forgotten all they had."""
        self.loads = [0] * self.num_ranks
        self.forget_prefixes()

    def choose(self, work: Work, wanted_rank: int | None) -> Placed:
        """A rank for `work`, which is counted at once. `wanted_rank` is obeyed."""
        placed = [self._placed(rank, work) for rank in range(self.num_ranks)]
        rank = wanted_rank
        if rank is None:
            loads, last = self.loads, self._last_used
            rank = min(range(self.num_ranks), key=lambda r: (loads[r] + placed[r].load, last[r]))
        self._num_choices += 1
        self._last_used[rank] = self._num_choices
        self.loads[rank] += placed[rank].load
        self._prefixes[rank].use(work.block_keys)
        return placed[rank]

    def _placed(self, rank: int, work: Work) -> Placed:
        known = self._prefixes[rank].num_known(work.block_keys) * work.block_size
        # A rank always computes the last token.
        uncached = max(1, work.num_prompt_tokens - known)
        return Placed(rank, uncached, work.num_expected_tokens)

    def done(self, rank: int, load: int) -> None:
        """`load` tokens of an earlier choice need no work any more."""
        self.loads[rank] -= load
