"""A chat's answer as blocks in a row: reasoning, text, calls. What newer protocols stream."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from msgspec import UNSET

from moed.server.api.chat_output import ChatOutput
from moed.server.api.choice_text import ChoiceText, Piece
from moed.server.api.responses import Delta


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """One block, so far."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments, as the model wrote them."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Grown:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block
    is_end: bool
    """Of the answer: what ended it ended the block."""


Change = Opened | Grown | Closed


class Blocks:
    """Feed it every piece of a choice in order. A block is closed before the next one opens."""

    def __init__(self, output: ChatOutput) -> None:
        self._output = output
        self.all: list[Block] = []

    def changes(self, piece: Piece, is_last: bool) -> Iterator[Change]:
        """What `piece` changes, in order; the last closes what is open."""
        for delta in self._output.deltas(piece, is_last):
            yield from self._take(delta)
        if is_last and self.all:
            yield Closed(self.all[-1], is_end=True)

    def all_changes(
        self, pieces: Iterable[tuple[int, Piece]], text: ChoiceText
    ) -> Iterator[Change]:
        """The same for several, as `Generation.pieces` has them: `text` has ended once its last
        piece is read.
        """
        for _, piece in pieces:
            yield from self.changes(piece, is_last=text.finish_reason is not None)

    def _take(self, delta: Delta) -> Iterator[Change]:
        if delta.tool_calls is not UNSET:
            for call in delta.tool_calls:
                if call.id is not UNSET and call.function.name is not UNSET:
                    yield from self._open(Kind.CALL, call.id, call.function.name)
                if call.function.arguments:
                    yield self._grow(call.function.arguments)
        elif delta.reasoning is not UNSET:
            yield from self._continue(Kind.REASONING, delta.reasoning)
        elif delta.content is not UNSET:
            yield from self._continue(Kind.TEXT, delta.content)

    def _continue(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if not self.all or self.all[-1].kind is not kind:
            yield from self._open(kind)
        yield self._grow(text)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        if self.all:
            yield Closed(self.all[-1], is_end=False)
        self.all.append(Block(len(self.all), kind, call_id, name))
        yield Opened(self.all[-1])

    def _grow(self, text: str) -> Change:
        self.all[-1].pieces.append(text)
        return Grown(self.all[-1], text)
