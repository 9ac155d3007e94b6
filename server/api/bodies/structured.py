"""What an output must follow, as requests say it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from moed.server.api.bodies.body import Body, wrong

MAX_GRAMMAR_CHOICES = 4096
MAX_TAGS = 128
MAX_TRIGGERS = 16
MAX_TAG_CHARACTERS = 200


def _check_choice(value: list[str]) -> list[str]:
    if not all(value):
        raise wrong("must not hold an empty string")
    return value


Choice = Annotated[
    list[str], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES), AfterValidator(_check_choice)
]
Schema = str | dict[str, Any]


class JsonSchemaFormat(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Every schema is followed to the letter."""


class TagStructure(Body):
    """`begin`, JSON by the schema, `end`."""

    begin: Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARACTERS)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: Annotated[str, Field(max_length=MAX_TAG_CHARACTERS)]


class TagContent(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class TagFormat(Body):
    type: Literal["tag"] | None = None
    begin: Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARACTERS)]
    content: TagContent
    end: Annotated[str, Field(max_length=MAX_TAG_CHARACTERS)]


Triggers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARACTERS)]],
    Field(min_length=1, max_length=MAX_TRIGGERS),
]


class TriggeredTags(Body):
    """The newer form of structural tags; of its kinds, this one is served."""

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Annotated[list[TagFormat], Field(min_length=1, max_length=MAX_TAGS)]
    at_least_one: bool | None = None
    stop_after_first: bool | None = None


class StructuralTags(Body):
    """Free text in which, where it comes to a trigger, a tag follows: `structures` and `triggers`,
    or `format`.
    """

    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_TAGS)] | None = (
        None
    )
    triggers: Triggers | None = None
    format: TriggeredTags | None = None


class ResponseFormat(StructuralTags):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """One of these."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark's syntax, or GBNF."""
    structural_tag: str | dict[str, Any] | None = None
    """What `response_format` of that type holds, as an object or as its text."""
