"""How the memory of processes grows while they work."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

MIB = 2**20


@dataclass
class MemoryWatch:
    """Samples by process: (seconds since the first one, MiB that are its own)."""

    samples: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    _started_at: float = field(default_factory=time.monotonic)

    def sample(self, pids: Sequence[int]) -> None:
        """Processes that have just ended are left out."""
        for pid in pids:
            try:
                rss = psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
            seconds = time.monotonic() - self._started_at
            self.samples.setdefault(pid, []).append((seconds, rss / MIB))

    def slope(self, pid: int) -> float:
        """MiB an hour: the line of least squares through the second half of its samples, since
        caches and pools grow first. 0 for too few samples.
        """
        own = self.samples.get(pid, [])
        own = own[len(own) // 2 :]
        if len(own) < 8:
            return 0.0
        mean_s = sum(s for s, _ in own) / len(own)
        mean_mib = sum(m for _, m in own) / len(own)
        squares = sum((s - mean_s) ** 2 for s, _ in own)
        return 3600 * sum((s - mean_s) * (m - mean_mib) for s, m in own) / squares

    def grown(self, pid: int) -> float:
        """MiB that the slope makes over the time that it was taken from."""
        own = self.samples.get(pid, [])
        own = own[len(own) // 2 :]
        return self.slope(pid) * (own[-1][0] - own[0][0]) / 3600 if len(own) > 1 else 0.0
