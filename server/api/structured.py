"""Structured output: which grammar a request asks for, and the text of it for the engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moed.server.api.bodies.conversation import Tool
from moed.server.api.bodies.sampling import SamplingBody
from moed.server.api.bodies.structured import StructuralTags
from moed.server.api.errors import InvalidRequest
from moed.server.api.state import AppState
from moed.server.api.structural_tags import read_structural_tags, structural_lark
from moed.server.grammar_checker import Question
from moed.server.grammar_library import GrammarError
from moed.server.tokenizer import TextTokenizer

ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class Asked:
    """A grammar as the client gave it."""

    kind: str
    source: str
    param: str


def asked_grammar(body: SamplingBody, state: AppState) -> Asked | None:
    """What the output must follow. Raises `InvalidRequest` when it is asked for twice."""
    found = [
        *_structural_tags(body, state.tools.tokenizer),
        *_response_format(body),
        *_structured_outputs(body),
        *_other_names(body),
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} both say what the output must follow; give one "
            "of them",
            param=found[1].param,
            code="invalid_value",
        )
    return found[0] if found else None


def _structural_tags(body: SamplingBody, tokenizer: TextTokenizer) -> list[Asked]:
    found: list[tuple[StructuralTags, str]] = []
    if body.response_format is not None and body.response_format.type == "structural_tag":
        found.append((body.response_format, "response_format"))
    outputs = body.structured_outputs
    if outputs is not None and outputs.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        found.append((read_structural_tags(outputs.structural_tag, param), param))
    return [Asked("lark", structural_lark(tags, p, tokenizer), p) for tags, p in found]


def _response_format(body: SamplingBody) -> list[Asked]:
    given = body.response_format
    if given is None or given.type in ("text", "structural_tag"):
        return []
    if given.type == "json_object":
        return [Asked("json", ANY_OBJECT, "response_format")]
    if given.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing: type 'json_schema' needs it",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    param = "response_format.json_schema.schema"
    return [Asked("json", _json_text(given.json_schema.schema_, param), param)]


def _structured_outputs(body: SamplingBody) -> list[Asked]:
    given = body.structured_outputs
    if given is None:
        return []
    values = {
        "json": ANY_OBJECT if given.json_object else given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
    }
    if given.json_object and given.json_ is not None:
        raise InvalidRequest(
            "structured_outputs.json and structured_outputs.json_object exclude each other",
            param="structured_outputs.json",
            code="invalid_value",
        )
    return [
        _asked(kind, value, f"structured_outputs.{kind}")
        for kind, value in values.items()
        if value is not None
    ]


# By parameter: the kind of grammar.
OTHER_NAMES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def _other_names(body: SamplingBody) -> list[Asked]:
    """Other servers' names, and vLLM's former ones."""
    given = ((name, kind, getattr(body, name)) for name, kind in OTHER_NAMES.items())
    return [_asked(kind, value, name) for name, kind, value in given if value is not None]


def _asked(kind: str, value: Any, param: str) -> Asked:
    return Asked(kind, value if isinstance(value, str) else _json_text(value, param), param)


def _json_text(value: Any, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(
            f"{param} is nested too deeply", param=param, code="invalid_value"
        ) from None


async def engine_grammar(question: Question, param: str, state: AppState) -> str:
    """The grammar's text for the engines, tried out; `param` is to blame otherwise. Raises
    `InvalidRequest`.
    """
    if not question.source.strip():
        raise InvalidRequest(f"{param} is empty", param=param, code="invalid_value")
    try:
        return await state.grammars.check(question)
    except GrammarError as error:
        raise InvalidRequest(
            f"{param} cannot be followed: {error}", param=param, code="invalid_value"
        ) from None


async def check_each_tool(tools: Sequence[Tool], state: AppState) -> None:
    """Raises `InvalidRequest` with the name of the first tool whose parameters by themselves cannot
    be followed.
    """
    for index, tool in enumerate(tools):
        if tool.function.parameters is None:
            continue
        source = _json_text(tool.function.parameters, "tools")
        try:
            await state.grammars.check(Question("json", source))
        except GrammarError as error:
            raise InvalidRequest(
                f"the parameters of {tool.function.name!r} (tools[{index}]) cannot be followed: "
                f"{error}",
                param="tools",
                code="invalid_value",
            ) from None
