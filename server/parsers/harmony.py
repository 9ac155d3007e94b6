"""gpt-oss: every part of an answer is a message of its own, on a channel, maybe to a tool."""

import re

from moed.server.parsers.json_calls import json_arguments
from moed.server.parsers.reader import Reader, Steps
from moed.server.parsers.sink import Sink
from moed.server.parsers.typed_values import ToolTypes

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."


def harmony(reader: Reader, sink: Sink, types: ToolTypes, has_tools: bool) -> Steps[None]:
    """`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`"""
    begun = ""
    while True:
        header, found = yield from reader.text_until((MESSAGE,))
        header = begun + header
        if found is None:
            # A header that was cut off; or text of a model that writes none.
            if CHANNEL not in header and START not in header:
                sink.content(header)
            return
        tool = _tool(header, types) if has_tools else None
        end = yield from _message(reader, sink, header, tool)
        if end is None:
            return
        begun = end if end in (START, CHANNEL) else ""


def _tool(header: str, types: ToolTypes) -> str | None:
    """The tool that a message goes to, if it is one of the client's."""
    found = RECIPIENT.search(header)
    if found is None:
        return None
    name = found.group(1)
    is_tool = name.startswith(FUNCTIONS) or name in types.properties
    return name.removeprefix(FUNCTIONS) if is_tool else None


def _message(reader: Reader, sink: Sink, header: str, tool: str | None) -> Steps[str | None]:
    """One message's body; returns the mark that ended it."""
    if tool is not None:
        sink.start_call(tool)
        return (yield from json_arguments(reader, sink, ENDS))
    channel = NAME.search(header)
    is_content = channel is None or channel.group(1) != "analysis"
    if is_content and RECIPIENT.search(header) is None:
        return (yield from reader.until(ENDS, sink.content))
    sink.begin_reasoning(reader.offset)
    end = yield from reader.until(ENDS, sink.reasoning)
    sink.end_reasoning(reader.offset)
    return end
