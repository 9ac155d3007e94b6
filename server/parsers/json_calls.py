"""Calls whose arguments are JSON as the model wrote it."""

from collections.abc import Sequence

from moed.server.parsers.reader import Reader, Steps, ignore
from moed.server.parsers.sink import Sink

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")


def json_call(reader: Reader, sink: Sink) -> Steps[bool]:
    """An object with a name and arguments, in either order. The call starts as soon as its name is
    known; False when it is not one: then nothing was started, or the rest is missing.
    """
    yield from reader.skip_space()
    if not (yield from reader.accept("{")):
        return False
    name: str | None = None
    early: str | None = None
    has_arguments = False
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        key = yield from reader.json_string()
        if key is None or not (yield from reader.accept_after_space(":")):
            return False
        yield from reader.skip_space()
        if key in NAME_KEYS and name is None:
            name = yield from reader.json_string()
            if not name:
                return False
            sink.start_call(name)
            if early is not None:
                sink.arguments(early)
        elif key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            if name is not None:
                if not (yield from reader.json_value(sink.arguments)):
                    return False
            else:
                found: list[str] = []
                if not (yield from reader.json_value(found.append)):
                    return False
                early = "".join(found)
        elif not (yield from reader.json_value(ignore)):
            return False
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            if not (yield from reader.accept("}")):
                return False
            break
    if name is not None and not has_arguments:
        sink.arguments("{}")
    return name is not None


def json_arguments(reader: Reader, sink: Sink, ends: Sequence[str]) -> Steps[str | None]:
    """Arguments, then anything up to the first of `ends`; returns that, None at the text's end."""
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first in ("{", "["):
        yield from reader.json_value(sink.arguments)
        return (yield from reader.until(ends, ignore))
    text, end = yield from reader.text_until(ends)
    sink.arguments(text.strip() or "{}")
    return end
