"""Calls that are enforced, as Lark rules for the grammar library."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moed.server.grammar_library import JSON_WHITESPACE
from moed.server.parsers.tool_syntax import ToolSpec, ToolSyntax
from moed.server.parsers.typed_values import is_text, types_of

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
INDEX = "{index}"


class Literals:
    """Texts as Lark terminals, in which special tokens stand by their ids."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if special_ids else None

    def terminals(self, text: str) -> str:
        return " ".join(self._parts(text))

    def has_special(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def _parts(self, text: str) -> Iterator[str]:
        place = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            if plain := text[place : match.start()]:
                yield _quoted(plain)
            yield f"<[{self._ids[match.group()]}]>"
            place = match.end()
        if rest := text[place:]:
            yield _quoted(rest)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def calls_grammar(
    syntax: ToolSyntax, tools: Sequence[ToolSpec], literals: Literals, *, several: bool
) -> str:
    """Lark rules whose `start` is one call of one of `tools`, or `several` of them."""
    rules = _calls_rules("call", syntax, tools, literals)
    return "\n".join([f"start: {_sequence('call', syntax, literals, several)}", *rules])


def free_grammar(
    syntax: ToolSyntax, tools: Sequence[ToolSpec], literals: Literals, *, several: bool
) -> str:
    """Lark rules whose `start` is any text, and maybe calls after it, as in `calls_grammar`. Only
    for a syntax with a `mark`.
    """
    assert syntax.mark is not None
    rules = _calls_rules("call", syntax, tools, literals)
    opened, first = _without_mark(syntax), "call"
    if not syntax.section[0]:
        # The mark is the first call's own; those behind it have it too.
        first = "first"
        rules += _calls_rules(first, opened, tools, literals)
    rest = _sequence(first, opened, literals, several)
    mark = literals.terminals(syntax.mark)
    if mark.startswith("<["):
        # No text holds a special token.
        texts = ["start: TEXT (opening rest)?", "TEXT: /(?s:.*)/", f"opening: {mark}"]
    else:
        pattern = re.escape(syntax.mark).replace("/", r"\/")
        texts = [
            "start: TEXT | opening rest",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{pattern}.*)/",
            f"opening[lazy]: /(?s:.*){pattern}/",
        ]
    return "\n".join([*texts, f"rest: {rest}", *rules])


def _without_mark(syntax: ToolSyntax) -> ToolSyntax:
    mark = syntax.mark or ""
    begin, end = syntax.section
    if begin:
        return replace(syntax, section=(begin.removeprefix(mark), end))
    return replace(syntax, head=syntax.head.removeprefix(mark))


def _sequence(first: str, syntax: ToolSyntax, literals: Literals, several: bool) -> str:
    """The rule `first`, and `call` for those after it."""
    separator = literals.terminals(syntax.separator)
    begin, end = map(literals.terminals, syntax.section)
    most = syntax.max_calls if several else 1
    more = f"({separator} call){{0,{most - 1}}}" if most > 1 else ""
    return " ".join(part for part in (begin, first, more, end) if part)


def _calls_rules(
    rule: str, syntax: ToolSyntax, tools: Sequence[ToolSpec], literals: Literals
) -> list[str]:
    """`rule`: a call of one of `tools`."""
    names = [f"{rule}_{number}" for number in range(len(tools))]
    rules = [f"{rule}: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        rules += _call_rules(name, tool, syntax, literals)
    return rules


def _call_rules(rule: str, tool: ToolSpec, syntax: ToolSyntax, literals: Literals) -> list[str]:
    head = syntax.head.replace("{json_name}", json.dumps(tool.name, ensure_ascii=False)[1:-1])
    head = head.replace("{name}", tool.name)
    before, has_index, after = head.partition(INDEX)
    index = "/[0-9]{1,2}/" if has_index else ""
    opening = " ".join(
        part for part in (literals.terminals(before), index, literals.terminals(after)) if part
    )
    schema = NO_PARAMETERS if tool.parameters is None else tool.parameters
    tail = literals.terminals(syntax.tail)
    if syntax.parameter is None:
        return [f"{rule}: {opening} {json_rule(schema)} {tail}"]
    rules, body = _parameter_rules(rule, schema, syntax.parameter, literals)
    return [f"{rule}: {opening} {body} {tail}", *rules]


def json_rule(schema: Mapping[str, Any]) -> str:
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return "%json " + json.dumps({**schema, **options}, ensure_ascii=False)


def _parameter_rules(
    rule: str, schema: Mapping[str, Any], tags: tuple[str, str], literals: Literals
) -> tuple[list[str], str]:
    """Rules of each property, in the schema's order, and the sequence of them."""
    properties = schema.get("properties")
    required = schema.get("required")
    rules, body = [], []
    for number, (key, value) in enumerate((properties or {}).items()):
        name = f"{rule}_{number}"
        is_string = is_text(types_of(value))
        before = tags[0].replace("{key}", key).replace("{is_string}", str(is_string).lower())
        begin = literals.terminals(before)
        if is_string and "enum" not in value:
            # Anything at all, up to the closing tag.
            rules.append(f"{name}_text[suffix={_quoted(tags[1])}]: /(?s:.*)/")
            rules.append(f"{name}: {begin} {name}_text")
        else:
            end = literals.terminals(tags[1])
            rules.append(f"{name}: {begin} {_value_rule(value, schema, is_string)} {end}")
        body.append(name if key in (required or ()) else f"{name}?")
    return rules, " ".join(body)


def _value_rule(value: Any, schema: Mapping[str, Any], is_string: bool) -> str:
    if is_string:
        return "(" + " | ".join(_quoted(word) for word in value["enum"]) + ")"
    if not isinstance(value, dict):
        return json_rule({})
    # References go to the whole schema's definitions.
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule({**shared, **value})
