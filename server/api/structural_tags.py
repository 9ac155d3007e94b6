"""Structural tags as requests give them, in either of their two forms."""

from typing import Any

import msgspec
from pydantic import ValidationError

from moed.server.api.bodies.structured import StructuralTags
from moed.server.api.errors import InvalidRequest
from moed.server.api.validation import first_problem
from moed.server.grammar_library import GrammarError
from moed.server.parsers.structural_tags import StructuralTag, structural_grammar
from moed.server.parsers.tool_grammar import Literals
from moed.server.tokenizer import TextTokenizer


def read_structural_tags(value: str | dict[str, Any], param: str) -> StructuralTags:
    """From `structured_outputs.structural_tag`. Raises `InvalidRequest`."""
    try:
        given = msgspec.json.decode(value) if isinstance(value, str) else value
        return StructuralTags.model_validate(given)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(
            f"{param} is not valid JSON: {error}", param=param, code="invalid_value"
        ) from None
    except ValidationError as error:
        located = [{**e, "loc": ("body", param, *e["loc"])} for e in error.errors()]
        problem = first_problem(located)
        raise InvalidRequest(problem.message, param=param, code=problem.code) from None


def structural_lark(given: StructuralTags, param: str, tokenizer: TextTokenizer) -> str:
    """The grammar. Raises `InvalidRequest`."""
    tags, triggers, is_needed, is_last = _parts(given, param)
    texts = " ".join([*triggers, *(f"{tag.begin} {tag.end}" for tag in tags)])
    names = {tokenizer.token_name(token_id): token_id for token_id in tokenizer.special_ids}
    literals = Literals({name: token_id for name, token_id in names.items() if name in texts})
    try:
        return structural_grammar(
            tags, triggers, literals, at_least_one=is_needed, stops_after_first=is_last
        )
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param, code="invalid_value") from None


def _parts(given: StructuralTags, param: str) -> tuple[list[StructuralTag], list[str], bool, bool]:
    """Tags, triggers, whether there must be a tag, and whether the first is the end."""
    form = given.format
    if form is not None and given.structures is None and given.triggers is None:
        tags = [StructuralTag(t.begin, t.content.json_schema, t.end) for t in form.tags]
        return tags, form.triggers, bool(form.at_least_one), bool(form.stop_after_first)
    if form is None and given.structures is not None and given.triggers is not None:
        older = [StructuralTag(t.begin, t.schema_, t.end) for t in given.structures]
        return older, given.triggers, False, False
    raise InvalidRequest(
        f"{param} needs either structures and triggers, or format",
        param=param,
        code="missing_required_parameter",
    )
