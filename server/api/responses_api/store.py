"""Answers that a later request may go on from, in memory and bounded: the oldest go first."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from moed.server.api.errors import NotFound

MAX_RESPONSES = 4096
MAX_STORED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Stored:
    """One answer, encoded: its size is known, and nobody can change it."""

    answer: bytes
    items: bytes
    """The whole conversation up to its end, instructions left out."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items)

    @property
    def history(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.items, type=list[dict[str, Any]])


class ResponseStore:
    """By owner and id: an answer is there only for the caller it was made for. One that is larger
    than all the room is not kept.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        self._stored[owner, response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, owner: str, response_id: str, param: str | None) -> Stored:
        """Raises `NotFound`."""
        found = self._stored.get((owner, response_id))
        if found is None:
            raise NotFound(
                f"there is no response {response_id[:100]!r}: it was never stored, was deleted, or "
                "has made room for newer ones (they are kept in memory only)",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self._stored.move_to_end((owner, response_id))
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Raises `NotFound`."""
        self._num_bytes -= self.get(owner, response_id, None).num_bytes
        del self._stored[owner, response_id]

    def __len__(self) -> int:
        return len(self._stored)
