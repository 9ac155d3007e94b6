"""How long the parts of a step's layers take, in steps where somebody asks."""

from collections.abc import Callable
from enum import StrEnum
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Part(StrEnum):
    """Of one decoder layer."""

    ATTENTION = "attention"
    """Its attention half: norm, projections, the cache, attention itself."""
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"


class PartTimes(Protocol):
    """Takes one step's times."""

    def timing(self, part: Part, call: Callable[P, R]) -> Callable[P, R]:
        """`call`, each of whose calls is `part` of one layer. Never waits for the device."""
        ...
