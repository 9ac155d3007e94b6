"""How much each expert of this process has computed, told to the front end at most once a second.

The counts live on the device. A report is copied from there without waiting, and sent after a later
step once the copy is complete.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

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
        self._copy: _Copy | None = None
        self._copied_at = time.monotonic()
        self._last: list[list[int]] | None = None

    def after_step(self) -> None:
        """Never waits for the device."""
        if self._copy is not None and self._copy.is_complete:
            self._tell(self._copy)
        now = time.monotonic()
        if self._copy is None and now - self._copied_at >= REPORT_INTERVAL_S:
            self._copy, self._copied_at = _Copy(self._model.moe_rows), now

    def before_sleep(self) -> None:
        """Tells the latest counts. The device has nothing else to do: it is waited for."""
        copy = _Copy(self._model.moe_rows)
        copy.wait()
        self._tell(copy)

    def _tell(self, copy: "_Copy") -> None:
        self._copy = None
        rows: list[list[int]] = copy.rows.tolist()
        if rows != self._last:
            self._last = rows
            self._send(ExpertLoad(self._rank, list(self._model.moe_layers), rows))


class _Copy:
    """Counts on their way from the device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if rows.is_cuda:
            self.rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self.rows.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self.rows = rows

    @property
    def is_complete(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
