"""How calls must be written where they are enforced: Lark rules for the grammar library.

A syntax is a few literal texts; `{name}` stands for the tool's name, `{json_name}` for it inside a
JSON string, `{index}` for the call's number. Texts that are special tokens of the checkpoint become
those tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moed.server.grammar_library import JSON_WHITESPACE
from moed.server.parsers.typed_values import is_text, types_of

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
INDEX = "{index}"
MAX_CALLS = 32


@dataclass(frozen=True)
class ToolSyntax:
    """`section[0]`, then calls with `separator` between them, then `section[1]`. A call is `head`,
    its arguments, `tail`.
    """

    head: str
    tail: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = "\n"
    parameter: tuple[str, str] | None = None
    """Around each argument's value, `{key}` in the first; None: arguments are one JSON object."""
    max_calls: int = MAX_CALLS
    mark: str | None = None
    """What the whole begins with, where text may come before it."""


@dataclass(frozen=True)
class ToolSpec:
    """One tool that may be called."""

    name: str
    parameters: Mapping[str, Any] | None


OBJECT = '{"name": "{json_name}", "arguments": '
SYNTAXES: Mapping[str, ToolSyntax] = {
    "hermes": ToolSyntax("<tool_call>\n" + OBJECT, "}\n</tool_call>", mark="<tool_call>"),
    "qwen3_coder": ToolSyntax(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        parameter=("<parameter={key}>\n", "\n</parameter>\n"),
        mark="<tool_call>",
    ),
    "deepseek_v3": ToolSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        mark="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v31": ToolSyntax(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="",
        mark="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v32": ToolSyntax(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        separator="",
        parameter=(
            '<｜DSML｜parameter name="{key}" string="{is_string}">',
            "</｜DSML｜parameter>\n",
        ),
        mark="<｜DSML｜function_calls>",
    ),
    "glm45": ToolSyntax(
        "<tool_call>{name}\n",
        "</tool_call>",
        parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        mark="<tool_call>",
    ),
    "kimi_k2": ToolSyntax(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="",
        mark="<|tool_calls_section_begin|>",
    ),
    "minimax_m2": ToolSyntax(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        separator="",
        parameter=('<parameter name="{key}">', "</parameter>\n"),
        mark="<minimax:tool_call>",
    ),
    "mistral": ToolSyntax(
        OBJECT, "}", section=("[TOOL_CALLS][", "]"), separator=", ", mark="[TOOL_CALLS]"
    ),
    "openai": ToolSyntax(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", max_calls=1
    ),
    **{
        name: ToolSyntax('{"name": "{json_name}", "parameters": ', "}", separator="; ")
        for name in ("llama3_json", "llama4_json")
    },
    # A call in JSON, which this format's models read as well; its own cannot follow a schema.
    **{
        name: ToolSyntax('{"name": "{json_name}", "parameters": ', "}", max_calls=1)
        for name in ("llama4_pythonic", "pythonic")
    },
}
# With names and arguments after marks of their own, as newer templates of this family have it.
MISTRAL_WITH_ARGUMENT_MARK = ToolSyntax(
    "[TOOL_CALLS]{name}[ARGS]", separator="", mark="[TOOL_CALLS]"
)


class Literals:
    """Texts as Lark terminals, in which special tokens stand by their ids."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if special_ids else None

    def terminals(self, text: str) -> str:
        return " ".join(self._parts(text))

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
        return [f"{rule}: {opening} {_json_rule(schema)} {tail}"]
    rules, body = _parameter_rules(rule, schema, syntax.parameter, literals)
    return [f"{rule}: {opening} {body} {tail}", *rules]


def _json_rule(schema: Mapping[str, Any]) -> str:
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
        return _json_rule({})
    # References go to the whole schema's definitions.
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return _json_rule({**shared, **value})
