"""Where parsers put what they find. White space between the parts of an answer is nobody's: it is
held until it is known to be inside one.
"""

import math

from moed.server.parsers.events import Content, Event, Reasoning, ToolArguments, ToolStart
from moed.server.parsers.reader import SPACE


class Sink:
    """Events in order, and how many tool calls have begun."""

    def __init__(self, max_calls: int | None) -> None:
        """`max_calls`: further calls are dropped; None: no bound."""
        self.events: list[Event] = []
        self.num_calls = 0
        """Tool calls that were told of."""
        self.num_started = 0
        """With those that were dropped."""
        self._max_calls = max_calls
        self._is_dropping = False
        self._held = ""
        self._strips = False
        self._has_reasoning = False
        self._held_reasoning = ""
        self._spans: list[tuple[int, float]] = []

    # Reasoning -----------------------------------------------------------------------------------

    def begin_reasoning(self, offset: int) -> None:
        """At this character of the output."""
        self._spans.append((offset, math.inf))

    def is_reasoning(self, offset: int) -> bool:
        """Whether the character there is part of the reasoning, its tags included."""
        return any(start <= offset < end for start, end in self._spans)

    def reasoning(self, text: str) -> None:
        """White space at its beginning and at its end is left out."""
        if not self._has_reasoning:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._has_reasoning = True
        text = self._held_reasoning + text
        kept = text.rstrip(SPACE)
        self._held_reasoning = text[len(kept) :]
        if kept:
            self.events.append(Reasoning(kept))

    def end_reasoning(self, offset: int) -> None:
        """What follows is something else."""
        self._spans[-1] = (self._spans[-1][0], offset)
        # A blank line between two stretches.
        self._held_reasoning = "\n\n" if self._has_reasoning else ""
        self._strips = True

    # Content -------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        if self._strips:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._strips = False
        text = self._held + text
        kept = text.rstrip(SPACE)
        self._held = text[len(kept) :]
        if kept:
            self.events.append(Content(kept))

    def last_content(self, text: str) -> None:
        """Content with no calls to come: only white space before it is left out."""
        if self._strips:
            text = text.lstrip(SPACE)
        if text:
            self._strips = False
            self.events.append(Content(text))

    def finish(self) -> None:
        """Nothing more comes: white space at the end of the content belongs to it."""
        if self._held:
            self.events.append(Content(self._held))
            self._held = ""

    # Tool calls ----------------------------------------------------------------------------------

    def start_call(self, name: str, call_id: str | None = None) -> None:
        self._is_dropping = self._max_calls is not None and self.num_calls >= self._max_calls
        self._held, self._strips = "", True
        self.num_started += 1
        if self._is_dropping:
            return
        self.events.append(ToolStart(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        if text and not self._is_dropping:
            self.events.append(ToolArguments(self.num_calls - 1, text))
