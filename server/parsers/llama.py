"""Llama's formats: the whole answer is a call, or there is none."""

import ast
import json

from moed.server.parsers.json_calls import json_call
from moed.server.parsers.reader import Reader, Steps, ignore
from moed.server.parsers.sink import Sink
from moed.server.parsers.typed_values import ToolTypes

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def llama_json(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """`{"name": …, "parameters": {…}}`, several with `;` between them."""
    reader.record()
    yield from reader.accept_after_space(PYTHON_TAG)
    while True:
        num_before = sink.num_started
        is_whole = yield from json_call(reader, sink)
        if is_whole:
            reader.record()
            is_whole = yield from reader.accept_after_space(";")
        elif sink.num_started > num_before:
            # Half a call: the rest of it is no content.
            reader.record()
        if not is_whole:
            break
    sink.content(reader.recorded())
    yield from reader.until((PYTHON_TAG,), sink.content)


def pythonic(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """`[name(key=value, …), …]`: read when it is complete."""
    reader.record()
    yield from reader.accept_after_space(PYTHON_START)
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        text, _ = yield from reader.text_until((PYTHON_END,))
        if (calls := _calls(text)) is not None:
            for name, arguments in calls:
                sink.start_call(name)
                sink.arguments(arguments)
            reader.record()
            yield from reader.until((PYTHON_START,), ignore)
            return
    sink.content(reader.recorded())
    yield from reader.until((PYTHON_START,), sink.content)


def _calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments; None for anything but a list of plain calls."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(entry) for entry in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(entry: ast.expr) -> tuple[str, str]:
    if not isinstance(entry, ast.Call) or entry.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in entry.keywords:
        if keyword.arg is None:
            raise ValueError("arguments must be named")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(entry.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
