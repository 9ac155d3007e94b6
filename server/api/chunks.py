"""Chunks of a streamed answer as events: what all of them have in common is encoded once."""

from typing import Any

import msgspec

from moed.server.api.event_stream import event
from moed.server.api.generation import Generation

# Of no JSON text but an answer's without choices: inside a string, quotes are escaped.
NO_CHOICES = b'"choices":[]'

_encoder = msgspec.json.Encoder()


class Chunks:
    """Makes events of one answer's choices."""

    def __init__(self, generation: Generation, kind: str) -> None:
        self._generation = generation
        self._kind = kind
        self._has_changing_usage = generation.has_changing_usage
        alone = event(generation.answer(kind, [], usage=generation.chunk_usage))
        head, _, tail = alone.partition(NO_CHOICES)
        self._head, self._tail = head + NO_CHOICES[:-1], b"]" + tail

    def event(self, choice: msgspec.Struct) -> bytes:
        """With the usage so far, where every chunk is to tell it."""
        if self._has_changing_usage:
            return self.event_with(choice)
        return self._head + _encoder.encode(choice) + self._tail

    def event_with(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """With more fields beside the choice."""
        generation = self._generation
        usage = generation.chunk_usage
        return event(generation.answer(self._kind, [choice], usage=usage, **more))

    def usage(self) -> bytes:
        """The chunk at the end that tells the usage; empty where nobody asked."""
        generation = self._generation
        if not generation.wants_usage:
            return b""
        return event(generation.answer(self._kind, [], usage=generation.usage))
