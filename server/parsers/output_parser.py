"""One answer as it grows: raw text in, events out."""

from dataclasses import dataclass, field

from moed.server.parsers.events import Event
from moed.server.parsers.harmony import harmony
from moed.server.parsers.reader import Reader, Steps
from moed.server.parsers.registry import HARMONY, HARMONY_REASONING, ReasoningFormat, ToolFormat
from moed.server.parsers.sink import Sink
from moed.server.parsers.think import think
from moed.server.parsers.typed_values import ToolTypes


@dataclass(frozen=True)
class ParserOptions:
    """What is known of an answer before it comes."""

    tools: ToolFormat | None
    """None: calls are not looked for."""
    reasoning: ReasoningFormat | None
    starts_inside: bool = False
    """The prompt has opened the reasoning."""
    types: ToolTypes = field(default_factory=ToolTypes)
    max_calls: int | None = None


class OutputParser:
    """The same text gives the same events, put together, however it is cut."""

    def __init__(self, options: ParserOptions) -> None:
        self._reader = Reader()
        self._sink = Sink(options.max_calls)
        self._steps: Steps[None] | None = self._parse(options)
        self._advance()

    def feed(self, text: str) -> list[Event]:
        """What is certain now."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The rest: nothing is lost, whatever was half-seen."""
        self._reader.end()
        events = self._advance()
        assert self._steps is None
        return events

    def is_reasoning(self, offset: int) -> bool:
        """Whether the character at `offset` of the raw text is reasoning."""
        return self._sink.is_reasoning(offset)

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._sink.num_calls

    def _advance(self) -> list[Event]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
                self._sink.finish()
        events, self._sink.events = self._sink.events, []
        return events

    def _parse(self, options: ParserOptions) -> Steps[None]:
        reader, sink = self._reader, self._sink
        tools, reasoning = options.tools, options.reasoning
        is_harmony = reasoning is not None and reasoning.name == HARMONY_REASONING
        if is_harmony or (tools is not None and tools.name == HARMONY):
            yield from harmony(reader, sink, options.types, has_tools=tools is not None)
        else:
            if reasoning is not None:
                yield from think(
                    reader, sink, reasoning.tags, options.starts_inside, reasoning.also_ends
                )
            if tools is not None:
                yield from tools.parse(reader, sink, options.types)
        yield from reader.rest(sink.last_content)
