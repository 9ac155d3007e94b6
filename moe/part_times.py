"""How long the parts of a step's layers take, in steps where somebody asks."""

import contextlib
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol


class Part(StrEnum):
    """Of one decoder layer."""

    ATTENTION = "attention"
    """Its attention half: norm, projections, the cache, attention itself."""
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"


class PartTimes(Protocol):
    """Takes one step's times."""

    def of(self, part: Part) -> AbstractContextManager[None]:
        """What happens inside is `part` of the next layer. Never waits for the device."""
        ...


_NOBODY = contextlib.nullcontext()


def timed(times: PartTimes | None, part: Part) -> AbstractContextManager[None]:
    """`times.of(part)`, which costs next to nothing where nobody asks."""
    return _NOBODY if times is None else times.of(part)
