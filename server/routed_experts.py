"""Which experts a request's tokens were routed to: from the step's tensor to messages, and from
messages to what a client gets.

Legend: T tokens, M MoE layers, K top-k.
"""

import base64
import io
from typing import TYPE_CHECKING

import numpy as np

from moed.server.messages import RoutedExperts

if TYPE_CHECKING:
    # The front end lives without torch.
    import torch

    from moed.server.scheduler import Schedule

DTYPE = np.dtype("<u2")


def keep_routed_experts(schedule: "Schedule", ids: "torch.Tensor") -> None:
    """Put each asking request's part of `ids` [T, M, K] aside, for its next output. Call it before
    the scheduler takes in the step's results.
    """
    rows = ids.cpu().numpy().astype(DTYPE)
    start = 0
    for scheduled in schedule.requests:
        request, end = scheduled.request, start + scheduled.num_tokens
        if request.params.return_routed_experts:
            part = RoutedExperts(
                request.num_computed_tokens, scheduled.num_tokens, rows[start:end].tobytes()
            )
            request.routed_experts.append(part)
        start = end


class RoutedRecord:
    """All that is known of one choice, by position; what comes again is taken once."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._parts: list[np.ndarray[tuple[int, ...], np.dtype[np.uint16]]] = []
        self._num_tokens = 0

    def add(self, part: RoutedExperts) -> None:
        """Take in the next part; parts begin at or before the end of what is known."""
        assert part.first_position <= self._num_tokens, (part.first_position, self._num_tokens)
        ids = np.frombuffer(part.ids, DTYPE).reshape(part.num_tokens, -1, self._top_k)
        new = ids[self._num_tokens - part.first_position :]
        if len(new):
            self._parts.append(new)
            self._num_tokens += len(new)

    def encoded(self, num_tokens: int) -> str:
        """A base64 .npy file of [num_tokens, M, K] uint16, or of fewer tokens when no more are
        known.
        """
        ids = np.concatenate(self._parts) if self._parts else np.zeros((0, 0, self._top_k), DTYPE)
        file = io.BytesIO()
        np.save(file, ids[:num_tokens], allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()
