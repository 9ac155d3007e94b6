"""One choice of a chat: its raw text becomes reasoning, content and tool calls."""

import secrets
import string
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET

from moed.server.api.choice_text import ChoiceText, Piece
from moed.server.api.responses import (
    ChatMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from moed.server.parsers.events import Content, Event, Reasoning, ToolArguments, ToolStart
from moed.server.parsers.output_parser import OutputParser, ParserOptions

SHORT_ID_CHARACTERS = 9


class ChatOutput:
    """Feed it every piece of the choice in order; the deltas put together are the message."""

    def __init__(self, options: ParserOptions, text: ChoiceText, *, shows_reasoning: bool) -> None:
        self._has_short_ids = options.tools is not None and options.tools.has_short_ids
        is_plain = options.tools is None and options.reasoning is None
        self._parser = None if is_plain else OutputParser(options)
        self._text = text
        self._shows_reasoning = shows_reasoning
        self._offsets: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []

    def deltas(self, piece: Piece, is_last: bool) -> list[Delta]:
        """What `piece` adds to the message, in order."""
        if self._parser is None:
            return list(self._delta(Content(piece.text))) if piece.text else []
        self._offsets += [token.text_offset for token in piece.tokens]
        events = self._parser.feed(piece.text)
        if is_last:
            events += self._parser.finish()
        return [delta for event in _merged(events) for delta in self._delta(event)]

    def _delta(self, event: Event) -> Iterator[Delta]:
        match event:
            case Content(text):
                self._content.append(text)
                yield Delta(content=text)
            case Reasoning(text):
                if self._shows_reasoning:
                    self._reasoning.append(text)
                    yield Delta(reasoning=text, reasoning_content=text)
            case ToolStart(index, name, call_id):
                call = ToolCall(call_id or self._new_id(), FunctionCall(name, ""))
                self._calls.append(call)
                self._arguments.append([])
                function = FunctionDelta("", name)
                yield Delta(
                    tool_calls=[
                        ToolCallDelta(index=index, id=call.id, type=call.type, function=function)
                    ]
                )
            case ToolArguments(index, text):
                self._arguments[index].append(text)
                yield Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(text))])

    def _new_id(self) -> str:
        if self._has_short_ids:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(SHORT_ID_CHARACTERS))
        return f"call_{secrets.token_hex(12)}"

    @property
    def message(self) -> ChatMessage:
        """All of it so far."""
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call.function.arguments = "".join(pieces)
        content = "".join(self._content)
        reasoning = "".join(self._reasoning) or UNSET
        is_silent = not content and (bool(self._calls) or reasoning is not UNSET)
        return ChatMessage(
            content=None if is_silent else content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=self._calls or UNSET,
        )

    @property
    def finish_reason(self) -> str | None:
        """That of the choice; an answer that ends by itself with calls ends for them. One that the
        client's own stop has cut inside a call is no call to make.
        """
        reason = self._text.finish_reason
        if reason != "stop" or not self._calls:
            return reason
        is_cut = self._text.stop_reason is not None and not _is_json("".join(self._arguments[-1]))
        return reason if is_cut else "tool_calls"

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags included."""
        if self._parser is None:
            return 0
        return sum(map(self._parser.is_reasoning, self._offsets))


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _merged(events: Sequence[Event]) -> list[Event]:
    """Pieces of one text that came at once, as one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case Content(before), Content(text):
                merged[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                merged[-1] = Reasoning(before + text)
            case ToolArguments(index, before), ToolArguments(other, text) if index == other:
                merged[-1] = ToolArguments(index, before + text)
            case _:
                merged.append(event)
    return merged
