"""What clients of Anthropic's protocol send."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from moed.server.api.bodies.body import INT64_MAX, Body
from moed.server.api.bodies.conversation import MAX_MESSAGES, MAX_TOOLS

MAX_STOP_SEQUENCES = 64
TEXT_ONLY = "this model reads nothing but text"

Text = str | list[dict[str, Any]]


def wrong(message: str) -> PydanticCustomError:
    # Braces would be taken as placeholders.
    return PydanticCustomError("invalid_value", "{text}", {"text": message})


def _check_blocks(value: Any) -> Text:
    """A string, or blocks of which each is an object that names its type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or an array of blocks")
    for index, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise wrong(f"block {index} must be an object with a type")
    return value


Blocks = Annotated[Text, PlainValidator(_check_blocks, json_schema_input_type=Text)]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolParam(Body):
    """A tool of the client's own; others run on Anthropic's servers."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: Blocks | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Taken, and of no effect: every prefix is cached as long as there is room."""


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]],
            Field(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
