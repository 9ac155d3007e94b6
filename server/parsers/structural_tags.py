"""Free text in which some beginnings must go on as they were announced, as Lark rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moed.server.grammar_library import GrammarError
from moed.server.parsers.tool_grammar import Literals, json_rule

SPECIAL = "<["
"""How a terminal begins that is a token by its id."""


@dataclass(frozen=True)
class StructuralTag:
    """`begin`, JSON that follows `schema`, `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def structural_grammar(
    tags: Sequence[StructuralTag],
    triggers: Sequence[str],
    literals: Literals,
    *,
    at_least_one: bool,
    stops_after_first: bool,
) -> str:
    """Lark rules whose `start` is text with any of `tags` in it: where text comes to one of
    `triggers`, it goes on as a tag that begins with it. Raises `GrammarError` for a tag that no
    trigger begins.
    """
    by_trigger: dict[str, list[StructuralTag]] = {trigger: [] for trigger in triggers}
    for number, tag in enumerate(tags):
        trigger = next((t for t in triggers if tag.begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"the begin of tag {number} does not begin with any of the triggers")
        by_trigger[trigger].append(tag)
    used = [trigger for trigger in triggers if by_trigger[trigger]]
    plain = [t for t in used if not literals.terminals(t).startswith(SPECIAL)]
    rules = [f"start: {_start(at_least_one, stops_after_first)}", f"TEXT: {_text(plain, literals)}"]
    rules.append("tag: " + " | ".join(f"opened_{number}" for number in range(len(used))))
    for number, trigger in enumerate(used):
        rules += _opened(number, trigger, by_trigger[trigger], literals)
    return "\n".join(rules)


def _start(at_least_one: bool, stops_after_first: bool) -> str:
    if stops_after_first:
        return "tag" if at_least_one else "tag | TEXT"
    return f"tag{'+' if at_least_one else '*'} TEXT"


def _text(plain: Sequence[str], literals: Literals) -> str:
    """Text that comes to no trigger; no text holds a special token."""
    for trigger in plain:
        if literals.has_special(trigger):
            raise GrammarError(f"a trigger may hold a special token only first: {trigger[:60]!r}")
    any_of = "|".join(map(_pattern, plain))
    return f"/(?s:.*)/ & ~/(?s:.*({any_of}).*)/" if plain else "/(?s:.*)/"


def _opened(
    number: int, trigger: str, tags: Sequence[StructuralTag], literals: Literals
) -> Iterator[str]:
    """Text up to the trigger, and one of its tags."""
    if literals.terminals(trigger).startswith(SPECIAL):
        yield f"opening_{number}: TEXT {literals.terminals(trigger)}"
    else:
        yield f"opening_{number}[lazy]: /(?s:.*){_pattern(trigger)}/"
    rests = []
    for tag in tags:
        begin, end = literals.terminals(tag.begin[len(trigger) :]), literals.terminals(tag.end)
        rests.append(" ".join(part for part in (begin, json_rule(tag.schema), end) if part))
    names = [f"rest_{number}_{place}" for place in range(len(rests))]
    yield f"opened_{number}: opening_{number} ({' | '.join(names)})"
    for name, rest in zip(names, rests, strict=True):
        yield f"{name}: {rest}"


def _pattern(text: str) -> str:
    """A regular expression as Lark writes one, on a line of its own."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace("\\\r", r"\r")
