"""The request bodies of all routes, with the limits that need nothing but the body itself.

Strict: a string is no number and a boolean is no integer. `null` means absent. Unknown fields are
kept aside, and told to the client as ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_MESSAGES = 20_000
MAX_TOOLS = 1000
MAX_ID_CHARACTERS = 200
MAX_STOP_STRINGS = 4
MAX_GRAMMAR_CHOICES = 4096
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_CACHE_SALT = 256
MAX_BAD_WORDS = 128
MAX_WORD_CHARACTERS = 100
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

Prompt = str | list[str] | list[int] | list[list[int]]


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be taken as placeholders.
    return PydanticCustomError("invalid_value", "{text}", {"text": message})


def _are_all(values: list[Any], kind: type) -> bool:
    """Exactly of `kind`: `true` is no integer. Fast, as prompts may have a million tokens."""
    return set(map(type, values)) <= {kind}


def _check_prompt(value: Any) -> Prompt:
    allowed = "must be a string, an array of strings, an array of token ids, or an array of those"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(allowed)
    if not value:
        raise _wrong("must not be empty")
    if _are_all(value, str) or _are_all(value, int):
        return value
    for entry in value:
        if not isinstance(entry, list) or not _are_all(entry, int):
            raise _wrong(allowed)
    return value


def _check_stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return []
    if not isinstance(strings, list) or not all(isinstance(entry, str) for entry in strings):
        raise _wrong(f"must be a string or an array of at most {MAX_STOP_STRINGS} strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise _wrong(f"may have at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    if not all(strings):
        raise _wrong("must not hold an empty string: it would end every output at once")
    if any(len(entry) > MAX_STOP_CHARACTERS for entry in strings):
        raise _wrong(f"may have strings of at most {MAX_STOP_CHARACTERS} characters")
    return strings


def _check_client_id(value: str) -> str:
    """It becomes a header."""
    if len(value) > MAX_ID_CHARACTERS:
        raise _wrong(f"may have at most {MAX_ID_CHARACTERS} characters")
    if not value or not all("!" <= character <= "~" for character in value):
        raise _wrong("must be printable ASCII without spaces")
    return value


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
ClientId = Annotated[str, AfterValidator(_check_client_id)]


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None

    def unknown_fields(self) -> dict[str, Any]:
        """Fields that this server does not know, with their values."""
        return dict(self.model_extra or {})


class StreamOptions(Body):
    include_usage: bool | None = None


def _check_choice(value: list[str]) -> list[str]:
    if not all(value):
        raise _wrong("must not hold an empty string")
    return value


Choice = Annotated[
    list[str], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES), AfterValidator(_check_choice)
]
Schema = str | dict[str, Any]


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Every schema is followed to the letter."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """One of these."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark's syntax, or GBNF."""


Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]


class SamplingBody(Body):
    """What both completion routes share."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # The smallest are no use, and a logit divided by one is no finite number.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = (
        None
    )
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """The prompt's last so many tokens are kept; -1: as many as fit beside one output token."""
    prompt_logprobs: Count | None = None
    """Of so many likely tokens at each position of the prompt, and of the prompt's own."""
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Annotated[
        list[str],
        PlainValidator(_check_stop, json_schema_input_type=str | list[str] | None),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """The prompt's beginning is shared only with requests of the same salt."""
    user: str | None = None
    """Who asks; taken, and of no effect here."""
    request_id: ClientId | None = None
    """Echoed as `x-request-id`."""
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    def unknown_fields(self) -> dict[str, Any]:
        unknown = super().unknown_fields()
        for outer in ("stream_options", "response_format", "structured_outputs"):
            given: Body | None = getattr(self, outer)
            nested = {} if given is None else given.unknown_fields()
            unknown |= {f"{outer}.{name}": value for name, value in nested.items()}
        return unknown


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)]
    echo: bool | None = None
    logprobs: Count | None = None


def _check_content(value: Any, info: ValidationInfo) -> str | None:
    """Text, or text parts joined; null only where the role may have nothing to say."""
    if isinstance(value, str):
        return value
    if value is None:
        if info.data.get("role") in ("assistant", None):
            return None
        raise _wrong("must be a string or an array of text parts")
    if not isinstance(value, list):
        raise _wrong("must be a string or an array of text parts")
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "refusal"):
            raise _wrong(f"part {index} must be of type 'text': this model reads nothing but text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _wrong(f"part {index} needs a string as its text")
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


def _check_tool_choice(value: Any) -> Any:
    allowed = (
        'must be \'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": …}}'
    )
    if value is None or value in ("none", "auto", "required"):
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError:
        raise _wrong(allowed) from None


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None

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
            raise _wrong("and add_generation_prompt exclude each other")
        return value


class ChatBody(Conversation, SamplingBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: Annotated[
        ToolChoice, PlainValidator(_check_tool_choice, json_schema_input_type=ToolChoice)
    ] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Passed to the chat template."""


class TokenizeBody(Body):
    """`POST /tokenize`: `prompt`, or `messages` as a chat request has them."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
