"""Every generation that has not ended, by the ids that its client knows; and ids of ended ones."""

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Protocol

# Ended ones that are still told from ids that never were.
MAX_ENDED = 10_000


Key = tuple[str, str]
"""Owner and id."""


class Abortable(Protocol):
    """What is needed of a generation."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def owner(self) -> str: ...

    def abort(self) -> None: ...


class Found(Enum):
    """What became of an id."""

    ABORTED = "aborted"
    FINISHED = "finished"
    UNKNOWN = "not_found"


class OpenGenerations:
    """A client's own ids may be given to several requests at once."""

    def __init__(self) -> None:
        self._open: dict[Key, list[Abortable]] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()

    def add(self, generation: Abortable) -> None:
        for name in generation.names:
            self._open.setdefault((generation.owner, name), []).append(generation)

    def remove(self, generation: Abortable) -> None:
        """Safe to call twice."""
        for name in generation.names:
            key = generation.owner, name
            others = [other for other in self._open.get(key, ()) if other is not generation]
            if others:
                self._open[key] = others
                continue
            self._open.pop(key, None)
            self._ended[key] = None
            self._ended.move_to_end(key)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def abort(self, owner: str | None, name: str) -> Found:
        """End the generations that `owner` knows as `name`; None: those of anybody."""
        found = [
            generation
            for key in _matching(self._open, owner, name)
            for generation in self._open[key]
        ]
        for generation in found:
            generation.abort()
        if found:
            return Found.ABORTED
        return Found.FINISHED if _matching(self._ended, owner, name) else Found.UNKNOWN

    def abort_all(self) -> int:
        """Returns how many there were."""
        found = {id(one): one for several in self._open.values() for one in several}
        for generation in found.values():
            generation.abort()
        return len(found)


def _matching(keys: Mapping[Key, object], owner: str | None, name: str) -> list[Key]:
    if owner is not None:
        return [(owner, name)] if (owner, name) in keys else []
    return [key for key in keys if key[1] == name]
