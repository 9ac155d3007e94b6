"""What a section of the GPU check found, kept in a file from its first row on: a section that is
killed later loses nothing.
"""

import contextlib
import dataclasses
import json
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One finding."""

    name: str
    value: float | str
    unit: str
    limit: float | None
    """A value above it fails."""
    passed: bool | None
    """None: a figure, which neither passes nor fails."""


class Report:
    """Of one section."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        self._write()

    def check(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Passes when `value` is a number and at most `limit`."""
        self._add(Row(name, value, unit, limit, value <= limit))

    def holds(self, name: str, is_true: bool, detail: str = "") -> None:
        """Passes when `is_true`."""
        self._add(Row(name, detail or ("yes" if is_true else "no"), "", None, is_true))

    def measure(self, name: str, value: float | str, unit: str = "") -> None:
        """A figure."""
        self._add(Row(name, value, unit, None, None))

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What is raised within is a failure of its own, after which the rest goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            self.holds(name, False, f"{type(error).__name__}: {first_line}"[:200])

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps([dataclasses.asdict(row) for row in self.rows]))


def read_rows(path: Path) -> list[Row]:
    """What a section left; none where it ended before it began."""
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except (OSError, ValueError):
        return []


def text_of(row: Row) -> str:
    """One line of the table."""
    mark = {True: "ok", False: "FAIL", None: ""}[row.passed]
    limit = "" if row.limit is None else f"at most {row.limit:.3g}"
    return f"  {mark:<5} {row.name:<58} {_number(row.value):>12} {row.unit:<8} {limit}".rstrip()


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
