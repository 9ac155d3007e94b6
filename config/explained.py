"""One resolved value, and where it came from."""

from dataclasses import dataclass
from typing import Any

DERIVED = "derived"
"""The origin of what follows from other values."""


@dataclass(frozen=True)
class Explained:
    """A row of `moed config show` and of `/server_info`. Never holds a secret."""

    name: str
    value: Any
    """Text, a number, a switch, a tuple of names, or None."""
    origin: str
    """A flag, a variable, a file, "default", "auto" with the reason, or `DERIVED`."""
