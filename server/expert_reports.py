"""How much each expert of this process has computed, told to the front end at most once a second.

The counts live on the device. A report is copied from there without waiting, and sent after a later
step once the copy is complete.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from moed.server.host_copy import HostCopy
from moed.server.messages import ExpertLoad

REPORT_INTERVAL_S = 1.0


class Counted(Protocol):
    """What is needed of `moed.moe.decoder.Decoder`."""

    @property
    def moe_layers(self) -> tuple[int, ...]: ...

    @property
    def moe_rows(self) -> torch.Tensor: ...


class ExpertReports:
    """Call `after_step` after each step, and `before_sleep` when no step follows for a while."""

    def __init__(self, rank: int, model: Counted, send: Callable[[ExpertLoad], None]) -> None:
        self._rank = rank
        self._model = model
        self._send = send
        self._copy: HostCopy | None = None
        self._copied_at = time.monotonic()
        self._last: list[list[int]] | None = None

    def after_step(self) -> None:
        """Never waits for the device."""
        if self._copy is not None and self._copy.is_complete:
            self._tell(self._copy)
        now = time.monotonic()
        if self._copy is None and now - self._copied_at >= REPORT_INTERVAL_S:
            self._copy, self._copied_at = HostCopy(self._model.moe_rows), now

    def before_sleep(self) -> None:
        """Tells the latest counts. The device has nothing else to do: it is waited for."""
        self._tell(HostCopy(self._model.moe_rows))

    def _tell(self, copy: HostCopy) -> None:
        self._copy = None
        rows: list[list[int]] = copy.wait().tolist()
        if rows != self._last:
            self._last = rows
            self._send(ExpertLoad(self._rank, list(self._model.moe_layers), rows))
