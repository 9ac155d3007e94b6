"""What both completion routes share: how tokens are chosen, when an output ends, what is sent."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from moed.server.api.bodies.body import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    Body,
    ClientId,
    Count,
    wrong,
)
from moed.server.api.bodies.structured import Choice, ResponseFormat, Schema, StructuredOutputs

MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_CACHE_SALT = 256
MAX_BAD_WORDS = 128
MAX_WORD_CHARACTERS = 100

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every chunk says what has been used so far."""


def check_stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return []
    if not isinstance(strings, list) or not all(isinstance(entry, str) for entry in strings):
        raise wrong(f"must be a string or an array of at most {MAX_STOP_STRINGS} strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise wrong(f"may have at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    if not all(strings):
        raise wrong("must not hold an empty string: it would end every output at once")
    if any(len(entry) > MAX_STOP_CHARACTERS for entry in strings):
        raise wrong(f"may have strings of at most {MAX_STOP_CHARACTERS} characters")
    return strings


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
    """So many tokens of the prompt are kept; -1: as many as fit beside one output token."""
    truncation_side: Literal["left", "right"] | None = None
    """Where the others are cut off: its beginning (left) unless it is set."""
    prompt_logprobs: Count | None = None
    """Of so many likely tokens at each position of the prompt, and of the prompt's own."""
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Annotated[
        list[str],
        PlainValidator(check_stop, json_schema_input_type=str | list[str] | None),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Of no effect: text is what the tokenizer makes of the tokens, and it adds no such spaces."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are named `token_id:5`: other than texts, ids are all different."""
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Tokens that are sent together, once the first has been."""
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """The prompt's beginning is shared only with requests of the same salt."""
    user: str | None = None
    """Who asks; taken, and of no effect here, as are the next three."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    request_id: ClientId | None = None
    """Echoed as `x-request-id`."""
    rid: ClientId | None = None
    """The same, as others call it."""
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Other servers' names for parts of `structured_outputs`.
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    @property
    def client_id(self) -> str | None:
        """What the client calls this request."""
        return self.rid if self.request_id is None else self.request_id

    def unknown_fields(self) -> dict[str, Any]:
        unknown = super().unknown_fields()
        for outer in ("stream_options", "response_format", "structured_outputs"):
            given: Body | None = getattr(self, outer)
            nested = {} if given is None else given.unknown_fields()
            unknown |= {f"{outer}.{name}": value for name, value in nested.items()}
        return unknown
