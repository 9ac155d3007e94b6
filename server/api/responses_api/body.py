"""What clients of `/v1/responses` send."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from moed.server.api.bodies.body import INT64_MAX, Body
from moed.server.api.bodies.conversation import MAX_MESSAGES, MAX_TOOLS

MAX_METADATA = 16

Input = str | list[dict[str, Any]]


def _check_input(value: Any) -> Input:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or an array of items")
    if not value:
        raise _wrong("must not be empty")
    if len(value) > MAX_MESSAGES:
        raise _wrong(f"may have at most {MAX_MESSAGES} items")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _wrong(f"item {index} must be an object")
    return value


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be taken as placeholders.
    return PydanticCustomError("invalid_value", "{text}", {"text": message})


class FunctionTool(Body):
    """A function of the client's own; other types run on OpenAI's servers."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    """Taken, and of no effect: the reasoning itself is shown."""
    generate_summary: str | None = None


class StreamOptions(Body):
    include_obfuscation: bool | None = None
    """Taken, and of no effect."""


class InputBody(Body):
    """`POST /v1/responses/input_tokens`."""

    input: Annotated[Input, PlainValidator(_check_input, json_schema_input_type=Input)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesBody(InputBody):
    """`POST /v1/responses`."""

    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
