"""Messages and tools: what a chat template is given."""

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from moed.server.api.bodies.body import Body, wrong

MAX_MESSAGES = 20_000
MAX_TOOLS = 1000


def _check_content(value: Any, info: ValidationInfo) -> str | None:
    """Text, or text parts joined; null only where the role may have nothing to say."""
    if isinstance(value, str):
        return value
    if value is None:
        if info.data.get("role") in ("assistant", None):
            return None
        raise wrong("must be a string or an array of text parts")
    if not isinstance(value, list):
        raise wrong("must be a string or an array of text parts")
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "refusal"):
            raise wrong(f"part {index} must be of type 'text': this model reads nothing but text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"part {index} needs a string as its text")
        texts.append(text)
    return "\n".join(texts)


class FunctionCall(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Body):
    """One message; fields that are not named here reach the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        PlainValidator(
            _check_content, json_schema_input_type=str | list[dict[str, Any] | str] | None
        ),
    ] = Field(default=None, validate_default=True)
    tool_calls: list[ToolCall] | None = None


class FunctionDefinition(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Calls of it follow the schema, where the model is free to call it as well."""


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(Body):
    """`tool_choice` for one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    """`tool_choice` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def check_tool_choice(value: Any) -> Any:
    allowed = (
        'must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": …}}, '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    )
    if value is None or value in ("none", "auto", "required"):
        return value
    is_some = isinstance(value, dict) and value.get("type") == "allowed_tools"
    try:
        return (AllowedToolsChoice if is_some else NamedTool).model_validate(value)
    except ValidationError:
        raise wrong(allowed) from None


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None

# `fail_fast`: one error is told, so none is looked for behind it.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Conversation(Body):
    """What the chat template is given."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _one_ending(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise wrong("and add_generation_prompt exclude each other")
        return value
