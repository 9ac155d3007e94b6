"""When a request that finds the queue full should come again: as fast as others have been ending.

Everybody told to wait gets a place of their own in the time to come, so that those who were refused
together do not all return at once.
"""

from collections import deque

MAX_ENDS = 100
MIN_RETRY_AFTER_S = 0.1
DEFAULT_RETRY_AFTER_S = 1.0
"""Where nothing has ended yet, so that no rate is known."""
MAX_RETRY_AFTER_S = 60.0
"""Clients such as `openai` do not wait for more than two minutes."""


class DrainRate:
    """Choices that end, by the `time.monotonic()` of their ends."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)
        self._promised_until = 0.0

    def on_end(self, now: float) -> None:
        self._ends.append(now)

    def retry_after_s(self, num_places: int, now: float) -> float:
        """Seconds until `num_places` should have come free that are promised to nobody yet."""
        if len(self._ends) < 2:
            return DEFAULT_RETRY_AFTER_S
        seconds_per_end = (now - self._ends[0]) / len(self._ends)
        self._promised_until = max(self._promised_until, now) + num_places * seconds_per_end
        # No client is told of a time after this one, so none is promised it.
        self._promised_until = min(self._promised_until, now + MAX_RETRY_AFTER_S)
        return max(MIN_RETRY_AFTER_S, self._promised_until - now)
