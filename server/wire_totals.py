"""What rows have taken between the processes, as the processes report it.

Legend: R processes, P phases, S scopes; last axis: dispatch, combine.
"""

from collections.abc import Iterator

import numpy as np

from moed.server.messages import SCOPES, ExpertLoad
from moed.server.phases import GROUP_PHASES

OPERATIONS = ("dispatch", "combine")


class WireTotals:
    """Keeps the last report of each process."""

    def __init__(self, num_ranks: int) -> None:
        shape = (num_ranks, len(GROUP_PHASES), len(SCOPES), len(OPERATIONS))
        self._bytes = np.zeros(shape, dtype=np.int64)
        # Of groups before.
        self._base = self._bytes.copy()

    def add(self, report: ExpertLoad) -> None:
        """Take in a report; it replaces the process's earlier one."""
        told = [
            [[sent.dispatch, sent.combine] for sent in map(by_scope.__getitem__, SCOPES)]
            for by_scope in map(report.wire_bytes.__getitem__, GROUP_PHASES)
        ]
        self._bytes[report.rank] = self._base[report.rank] + np.asarray(told, dtype=np.int64)

    def start_anew(self) -> None:
        """The processes count from 0 again; what is known stays."""
        self._base = self._bytes.copy()

    def totals(self) -> Iterator[tuple[str, str, str, int]]:
        """Operation, scope, phase and bytes, of all processes together."""
        sums = self._bytes.sum(axis=0)
        for (phase, scope, operation), num_bytes in np.ndenumerate(sums):
            yield OPERATIONS[operation], SCOPES[scope], GROUP_PHASES[phase], int(num_bytes)
