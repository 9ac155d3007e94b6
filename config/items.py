"""Lines of the arithmetic of memory."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One line."""

    name: str
    num_bytes: int
    formula: str


def total(items: Sequence[Item]) -> int:
    return sum(item.num_bytes for item in items)
