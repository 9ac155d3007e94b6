"""What a parser finds, in order."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolStart:
    """A call begins; its arguments follow."""

    index: int
    name: str
    call_id: str | None
    """As the model wrote it, where its format has ids."""


@dataclass(frozen=True)
class ToolArguments:
    """The next piece of a call's arguments, which are one JSON text put together."""

    index: int
    text: str


Event = Reasoning | Content | ToolStart | ToolArguments
