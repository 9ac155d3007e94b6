"""Formats in which a mark opens each call, or a section of calls: what surrounds them is content.

Hermes, DeepSeek, Kimi and Mistral; their arguments are JSON.
"""

from collections.abc import Callable, Sequence

from moed.server.parsers.json_calls import json_arguments, json_call
from moed.server.parsers.reader import Reader, Steps, ignore
from moed.server.parsers.sink import Sink
from moed.server.parsers.typed_values import ToolTypes

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
MISTRAL_BEGIN, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CODE_FENCE = "```"


def tagged(
    reader: Reader, sink: Sink, begins: Sequence[str], parse: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Content, and `parse(mark)` after each of the marks `begins`. What turns out to be no call is
    content, mark and all.
    """
    while (mark := (yield from reader.until(begins, sink.content))) is not None:
        num_before = sink.num_started
        reader.record()
        yield from parse(mark)
        text = reader.recorded()
        if sink.num_started == num_before:
            sink.content(mark + text)


def hermes(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`"""

    def call(mark: str) -> Steps[None]:
        num_before = sink.num_started
        is_whole = yield from json_call(reader, sink)
        if is_whole:
            yield from reader.accept_after_space(HERMES_END)
        elif sink.num_started > num_before:
            yield from reader.until((HERMES_END,), ignore)

    yield from tagged(reader, sink, (HERMES_BEGIN,), call)


def deepseek(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """V3 has `function`, a separator, the name and fenced JSON; V3.1 the name, a separator and the
    JSON.
    """
    section_begin, section_end = DEEPSEEK_SECTION
    call_begin, call_end = DEEPSEEK_CALL

    def section(mark: str) -> Steps[None]:
        if mark == section_begin:
            mark_after = yield from reader.until((call_begin, section_end), ignore)
        else:
            mark_after = mark
        while mark_after == call_begin:
            head, found = yield from reader.text_until((DEEPSEEK_SEPARATOR, call_end))
            if found == DEEPSEEK_SEPARATOR:
                yield from one_call(head.strip())
            mark_after = yield from reader.until((call_begin, section_end), ignore)

    def one_call(head: str) -> Steps[None]:
        name = head
        if head == "function":
            line, end = yield from reader.text_until(("\n", call_end))
            if end != "\n":
                return
            name = line.strip()
            if (yield from reader.accept_after_space(CODE_FENCE)):
                yield from reader.accept("json")
        if name:
            sink.start_call(name)
            yield from json_arguments(reader, sink, (call_end,))

    yield from tagged(reader, sink, (section_begin, call_begin), section)


def kimi(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """A section of calls, each named by its id, `functions.NAME:INDEX`."""
    section_begin, section_end = KIMI_SECTION
    call_begin, call_end = KIMI_CALL

    def section(mark: str) -> Steps[None]:
        while (yield from reader.until((call_begin, section_end), ignore)) == call_begin:
            head, found = yield from reader.text_until((KIMI_ARGUMENTS, call_end, section_end))
            call_id = head.strip()
            name = call_id.removeprefix("functions.").rpartition(":")[0]
            if found == KIMI_ARGUMENTS and (name or call_id):
                sink.start_call(name or call_id, call_id)
                end = yield from json_arguments(reader, sink, (call_end, section_end))
                if end == section_end:
                    return

    yield from tagged(reader, sink, (section_begin,), section)


def mistral(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """An array of objects, or (newer) a name and its arguments after each mark."""

    def calls(mark: str) -> Steps[None]:
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[" and not (yield from reader.accept(MISTRAL_ARGUMENTS)):
            yield from reader.accept("[")
            yield from array()
            return
        head, found = yield from reader.text_until((MISTRAL_ARGUMENTS, MISTRAL_ID, "{"))
        call_id = None
        if found == MISTRAL_ID:
            text, found = yield from reader.text_until((MISTRAL_ARGUMENTS, "{"))
            call_id = text.strip()
        if found is None or not head.strip():
            return
        if found == "{":
            reader.put_back("{")
        sink.start_call(head.strip(), call_id)
        yield from reader.skip_space()
        yield from reader.json_value(sink.arguments)

    def array() -> Steps[None]:
        while (yield from json_call(reader, sink)):
            if not (yield from reader.accept_after_space(",")):
                yield from reader.accept_after_space("]")
                return

    yield from tagged(reader, sink, (MISTRAL_BEGIN,), calls)
