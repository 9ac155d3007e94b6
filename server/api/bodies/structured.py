"""What an output must follow, as requests say it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from moed.server.api.bodies.body import Body, wrong

MAX_GRAMMAR_CHOICES = 4096


def _check_choice(value: list[str]) -> list[str]:
    if not all(value):
        raise wrong("must not hold an empty string")
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
