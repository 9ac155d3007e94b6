"""What the experts of this process have computed and what its rows took to reach others, told to
the front end at most once a second.

The counts live on the device, and are split there by the phase of the steps. A report is copied
from there without waiting, and sent after a later step once the copy is complete.

Legend: P phases, R processes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from moed.dist.all2all.traffic import Traffic
from moed.server.host_copy import HostCopy
from moed.server.messages import INTER, INTRA, SCOPES, ExpertLoad, WireBytes
from moed.server.phases import GROUP_PHASES

REPORT_INTERVAL_S = 1.0


class Counted(Protocol):
    """What is needed of `moed.moe.decoder.Decoder`."""

    @property
    def moe_layers(self) -> tuple[int, ...]: ...

    @property
    def moe_rows(self) -> torch.Tensor: ...


class CountsByPhase:
    """What a counter counts from now on, by the phase in which it does."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        """`read`: the counter, which only grows."""
        self._read = read
        self._seen = read().clone()
        self._by_phase = {phase: torch.zeros_like(self._seen) for phase in GROUP_PHASES}

    def take_in(self, phase: str) -> None:
        """What has been counted since the last call was of `phase`."""
        now = self._read().clone()
        self._by_phase[phase] += now - self._seen
        self._seen = now

    def copy(self) -> HostCopy:
        """[P, ...], on its way to the host."""
        return HostCopy(torch.stack(list(self._by_phase.values())))


@dataclass(frozen=True)
class _Copies:
    """What was counted until a step, on its way to the host."""

    num_steps: int
    num_tokens: int
    rows: HostCopy
    sent: HostCopy


class ExpertReports:
    """Call `before_step` and `after_step` around each step, and `before_sleep` when none follows
    for a while.
    """

    def __init__(
        self,
        rank: int,
        model: Counted,
        traffic: Traffic,
        local_ranks: range,
        send: Callable[[ExpertLoad], None],
    ) -> None:
        """`rank`: of the process; `local_ranks`: of those on its host. What was counted before is
        nobody's load.
        """
        self._rank = rank
        self._model = model
        self._traffic = traffic
        self._local_ranks = local_ranks
        self._send = send
        self._rows = CountsByPhase(lambda: model.moe_rows)
        self._sent = CountsByPhase(lambda: traffic.rows_sent)
        self._phase = GROUP_PHASES[0]
        self._num_steps = self._num_tokens = 0
        self._copies: _Copies | None = None
        self._copied_at = time.monotonic()
        self._last: ExpertLoad | None = None

    def before_step(self, phase: str, num_tokens: int) -> None:
        """`phase`: of the step of all ranks; `num_tokens`: of this DP rank, 0 for other members."""
        if phase != self._phase:
            self._take_in()
            self._phase = phase
        self._num_steps += 1
        self._num_tokens += num_tokens

    def after_step(self) -> None:
        """Never waits for the device."""
        copies = self._copies
        if copies is not None and copies.rows.is_complete and copies.sent.is_complete:
            self._tell(copies)
        now = time.monotonic()
        if self._copies is None and now - self._copied_at >= REPORT_INTERVAL_S:
            self._copies, self._copied_at = self._copy(), now

    def before_sleep(self) -> None:
        """Tells the latest counts. The device has nothing else to do: it is waited for."""
        self._tell(self._copy())

    def _take_in(self) -> None:
        self._rows.take_in(self._phase)
        self._sent.take_in(self._phase)

    def _copy(self) -> "_Copies":
        self._take_in()
        return _Copies(self._num_steps, self._num_tokens, self._rows.copy(), self._sent.copy())

    def _tell(self, copies: "_Copies") -> None:
        self._copies = None
        rows, sent = copies.rows.wait().tolist(), copies.sent.wait().tolist()
        load = ExpertLoad(
            self._rank,
            copies.num_steps,
            copies.num_tokens,
            list(self._model.moe_layers),
            dict(zip(GROUP_PHASES, rows, strict=True)),
            dict(zip(GROUP_PHASES, map(self._wire_bytes, sent), strict=True)),
        )
        if load != self._last:
            self._last = load
            self._send(load)

    def _wire_bytes(self, to_ranks: list[int]) -> dict[str, WireBytes]:
        """By scope, of the rows that went `to_ranks` [R]."""
        num_rows = dict.fromkeys(SCOPES, 0)
        for rank, count in enumerate(to_ranks):
            if rank != self._rank:
                num_rows[INTRA if rank in self._local_ranks else INTER] += count
        traffic = self._traffic
        return {
            scope: WireBytes(rows * traffic.dispatch_row_bytes, rows * traffic.combine_row_bytes)
            for scope, rows in num_rows.items()
        }
