"""How often processes may be started again before it is no use."""

from collections import deque
from collections.abc import Callable

WINDOW_S = 600.0


class RestartBudget:
    """At most `most` in any `WINDOW_S`."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.most = most
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """False when there is none left."""
        now = self._clock()
        while self._taken and now - self._taken[0] > WINDOW_S:
            self._taken.popleft()
        if len(self._taken) >= self.most:
            return False
        self._taken.append(now)
        return True

    @property
    def num_taken(self) -> int:
        """In the window that ends with the last one."""
        return len(self._taken)
