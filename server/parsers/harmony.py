"""gpt-oss: every part of an answer is a message of its own, on a channel, maybe to a tool."""

import re

from moed.server.parsers.json_calls import json_arguments
from moed.server.parsers.reader import Reader, Steps
from moed.server.parsers.sink import Sink

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."


def harmony(reader: Reader, sink: Sink, has_tools: bool) -> Steps[None]:
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
        end = yield from _message(reader, sink, header, has_tools)
        if end is None:
            return
        begun = end if end in (START, CHANNEL) else ""


def _message(reader: Reader, sink: Sink, header: str, has_tools: bool) -> Steps[str | None]:
    """One message's body; returns the mark that ended it."""
    recipient = RECIPIENT.search(header)
    channel = NAME.search(header)
    if recipient is not None and recipient.group(1).startswith(FUNCTIONS) and has_tools:
        sink.start_call(recipient.group(1).removeprefix(FUNCTIONS))
        return (yield from json_arguments(reader, sink, ENDS))
    if recipient is None and (channel is None or channel.group(1) != "analysis"):
        return (yield from reader.until(ENDS, sink.content))
    sink.begin_reasoning(reader.offset)
    end = yield from reader.until(ENDS, sink.reasoning)
    sink.end_reasoning(reader.offset)
    return end
