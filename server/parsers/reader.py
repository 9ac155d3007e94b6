"""Text that comes in pieces, read as if it were all there.

Parsers are generators: they `yield` where more text is needed, and are resumed with more, or at the
end. What they decide depends on the text alone, never on how it was cut.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
Emit = Callable[[str], None]

SPACE = " \t\r\n"
OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
INSIDE_STRING = re.compile(r'["\\]')
END_OF_SCALAR = re.compile(r"[,}\]\s<]")


def ignore(text: str) -> None:
    """Where text is of no use."""


class Reader:
    """What is not yet read, and helpers that read."""

    def __init__(self) -> None:
        self._text = ""
        self._has_ended = False
        self._recorded: list[str] | None = None
        self.offset = 0
        """Characters read."""

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._has_ended = True

    # Single steps --------------------------------------------------------------------------------

    def _need(self, length: int) -> Steps[bool]:
        """Wait for `length` unread characters; False when they never come."""
        while len(self._text) < length:
            if self._has_ended:
                return False
            yield
        return True

    def _read(self, length: int) -> str:
        text, self._text = self._text[:length], self._text[length:]
        self.offset += length
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Unread what has just been read."""
        self._text = text + self._text
        self.offset -= len(text)
        if self._recorded is not None:
            kept = "".join(self._recorded)
            self._recorded = [kept[: len(kept) - len(text)]]

    def record(self) -> None:
        """From here on remember what is read, for `recorded`."""
        self._recorded = []

    def recorded(self) -> str:
        """What was read since `record`; the end of it."""
        parts, self._recorded = self._recorded, None
        return "".join(parts or ())

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        yield from self._need(1)
        return self._text[:1]

    def skip_space(self) -> Steps[str]:
        """Read white space; returns it."""
        found = []
        while (yield from self._need(1)) and self._text[0] in SPACE:
            found.append(self._read(1))
        return "".join(found)

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it is next."""
        length = 1
        while literal.startswith(self._text[:length]):
            if not (yield from self._need(length)):
                return False
            if self._text[:length] != literal[:length]:
                return False
            if length == len(literal):
                self._read(length)
                return True
            length += 1
        return False

    def accept_after_space(self, literal: str) -> Steps[bool]:
        """Read white space and `literal`, or nothing at all."""
        space = yield from self.skip_space()
        if (yield from self.accept(literal)):
            return True
        self.put_back(space)
        return False

    # Stretches -----------------------------------------------------------------------------------

    def until(self, markers: Sequence[str], emit: Emit) -> Steps[str | None]:
        """Read up to and with the first of `markers`, `emit` what is before it as soon as it is
        certain. Returns the marker; None when the text ended without one. No marker may begin
        with another.
        """
        while True:
            places = [(place, m) for m in markers if (place := self._text.find(m)) >= 0]
            if places:
                place, marker = min(places)
                if place:
                    emit(self._read(place))
                self._read(len(marker))
                return marker
            certain = len(self._text) - _longest_beginning(self._text, markers)
            if self._has_ended:
                certain = len(self._text)
            if certain:
                emit(self._read(certain))
            if self._has_ended:
                return None
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Read all there is."""
        while (yield from self._need(1)):
            emit(self._read(len(self._text)))

    def text_until(self, markers: Sequence[str]) -> Steps[tuple[str, str | None]]:
        """As `until`: the text before it, and the marker."""
        found: list[str] = []
        marker = yield from self.until(markers, found.append)
        return "".join(found), marker

    # JSON ----------------------------------------------------------------------------------------

    def json_string(self) -> Steps[str | None]:
        """The value of a JSON string; None where there is none."""
        if (yield from self.peek()) != '"':
            return None
        raw: list[str] = []
        if not (yield from self.json_value(raw.append)):
            return None
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            return None

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Read one JSON value and `emit` its text as it comes; False when it is not complete. What
        is within brackets is not checked.
        """
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            return (yield from self._json_scalar(emit))
        depth, in_string = 0, False
        while (yield from self._need(1)):
            pattern = INSIDE_STRING if in_string else OUTSIDE_STRING
            match = pattern.search(self._text)
            if match is None:
                emit(self._read(len(self._text)))
                continue
            character = match.group()
            if character == "<":
                # No JSON, so the end tag that comes after it.
                if match.start():
                    emit(self._read(match.start()))
                return False
            if character == "\\":
                # With the character that it escapes.
                if not (yield from self._need(match.start() + 2)):
                    emit(self._read(len(self._text)))
                    return False
                emit(self._read(match.start() + 2))
                continue
            emit(self._read(match.end()))
            if character == '"':
                in_string = not in_string
            else:
                depth += 1 if character in "{[" else -1
            if depth <= 0 and not in_string:
                return True
        return False

    def _json_scalar(self, emit: Emit) -> Steps[bool]:
        """A number, true, false or null: up to what cannot be part of one."""
        is_empty = True
        while (yield from self._need(1)):
            match = END_OF_SCALAR.search(self._text)
            length = len(self._text) if match is None else match.start()
            if length:
                emit(self._read(length))
                is_empty = False
            if match is not None:
                return not is_empty
        return False


def _longest_beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that a marker begins with."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        ending = text[-length:]
        if any(marker.startswith(ending) for marker in markers):
            return length
    return 0
