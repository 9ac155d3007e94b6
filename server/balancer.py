"""Which rank gets a request: the one with the least work in tokens, ties to the one longest unused.

Loads are counted here, at the moment of choosing, and never copied from a report that a rank made
earlier: a burst spreads evenly although no rank has answered yet.
"""

# How much of `max_tokens` counts as work to come. Most outputs end long before a large limit, and
# one request with a limit of 100k tokens must not keep a rank empty.
EXPECTED_OUTPUT_TOKENS = 256


def request_load(num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that a new request is expected to cost."""
    return num_prompt_tokens + min(max_tokens, EXPECTED_OUTPUT_TOKENS)


class Balancer:
    """Work of each rank in tokens: added when a request is given, taken off as it is done."""

    def __init__(self, num_ranks: int) -> None:
        self.loads = [0] * num_ranks
        self._last_used = [0] * num_ranks
        self._num_choices = 0

    @property
    def num_ranks(self) -> int:
        return len(self.loads)

    def choose(self, load: int, wanted_rank: int | None) -> int:
        """A rank for `load` more tokens, which are counted at once. `wanted_rank` is obeyed."""
        rank = wanted_rank
        if rank is None:
            rank = min(range(len(self.loads)), key=lambda r: (self.loads[r], self._last_used[r]))
        self._num_choices += 1
        self._last_used[rank] = self._num_choices
        self.loads[rank] += load
        return rank

    def done(self, rank: int, load: int) -> None:
        """`load` tokens of an earlier choice need no work any more."""
        self.loads[rank] -= load
