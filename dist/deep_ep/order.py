"""The order of low-latency calls that DeepEP demands, enforced.

Two internal buffers alternate, and a call clears the other one's counters. So a call must have been
received before the next is issued, at most two results may be in use, and the counters must be
cleaned after high-throughput calls and when sizes change. DeepEP itself hangs or miscounts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moed.dist.deep_ep.rules import require

MAX_LIVE_RESULTS = 2
Sizes = tuple[int, int, int]
"""N, H, E."""


class Watch:
    """Tells whether the memory of a tensor is still in use, by a view of it too, without keeping
    it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def is_in_use(self) -> bool:
        return not self._storage.expired()


@dataclass
class Result:
    """The result tensor of one call."""

    name: str
    memory: Watch | None
    """None for memory of the caller's own."""
    is_consumed: bool = False

    @property
    def is_live(self) -> bool:
        return self.memory is not None and not self.is_consumed and self.memory.is_in_use


class LowLatencyOrder:
    """What happened so far on one buffer."""

    def __init__(self) -> None:
        self._unreceived: str | None = None
        self._dirty_since: str | None = None
        self._sizes: Sizes | None = None
        self._results: list[Result] = []

    def check_received(self, name: str) -> None:
        """Refuse call `name` while an earlier one waits for its hook."""
        require(
            self._unreceived is None,
            f"{name} while {self._unreceived} is not received: call its hook first",
        )

    def check(self, name: str, sizes: Sizes, consumes: Result | None = None) -> None:
        """Refuse call `name` unless its turn has come. `consumes`: the result that it uses up."""
        self.check_received(name)
        require(
            self._dirty_since is None,
            f"{name} after {self._dirty_since}: call clean_low_latency_buffer on all ranks first",
        )
        require(
            self._sizes in (None, sizes),
            f"{name} with (N, H, E) {sizes} after {self._sizes}: call clean_low_latency_buffer "
            "on all ranks first",
        )
        self._results = [result for result in self._results if result.is_live]
        live = [result.name for result in self._results if result is not consumes]
        require(
            len(live) < MAX_LIVE_RESULTS,
            f"{name} while the results of {live} are in use: two at most may be, this included",
        )

    def issue(
        self, name: str, sizes: Sizes, tensor: torch.Tensor | None, *, is_received: bool
    ) -> Result:
        """The call was made; `tensor` is its result, None where that is the caller's own."""
        result = Result(name, None if tensor is None else Watch(tensor))
        self._sizes = sizes
        self._results.append(result)
        self._unreceived = None if is_received else name
        return result

    def receive(self) -> None:
        """The hook of the last call was called."""
        self._unreceived = None

    def soil(self, name: str) -> None:
        """A high-throughput call `name` used the buffer."""
        self._dirty_since = name

    def clean(self, sizes: Sizes) -> None:
        """The counters are zero on all ranks."""
        self._dirty_since = None
        self._sizes = sizes
