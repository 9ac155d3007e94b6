"""`POST /v1/completions`."""

from typing import Annotated, Any

from pydantic import PlainValidator

from moed.server.api.bodies.body import Count, wrong
from moed.server.api.bodies.sampling import SamplingBody

Prompt = str | list[str] | list[int] | list[list[int]]


def are_all(values: list[Any], kind: type) -> bool:
    """Exactly of `kind`: `true` is no integer. Fast, as prompts may have a million tokens."""
    return set(map(type, values)) <= {kind}


def check_prompt(value: Any) -> Prompt:
    allowed = "must be a string, an array of strings, an array of token ids, or an array of those"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(allowed)
    if not value:
        raise wrong("must not be empty")
    if are_all(value, str) or are_all(value, int):
        return value
    for entry in value:
        if not isinstance(entry, list) or not are_all(entry, int):
            raise wrong(allowed)
    return value


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, PlainValidator(check_prompt, json_schema_input_type=Prompt)]
    echo: bool | None = None
    logprobs: Count | None = None
