"""The grammar of a whole answer: reasoning as the model writes it, then what is asked for."""

from collections.abc import Callable

from moed.server.parsers import harmony
from moed.server.parsers.registry import HARMONY_REASONING, ReasoningFormat
from moed.server.parsers.tool_grammar import Literals

BODY, CALLS = "@body", "@calls"
ANY_TEXT = "/(?s:.*)/"
# Between the reasoning and the rest.
GAP = r"/[ \n]{0,4}/"


def answer_grammar(
    reasoning: ReasoningFormat | None,
    literals: Literals,
    is_special: Callable[[str], bool],
    *,
    starts_inside: bool,
    body_is_calls: bool,
    has_calls: bool,
) -> str:
    """Lark rules that wrap the grammar `body` (and, `has_calls`, allow `calls` in its place); empty
    where there is nothing to wrap. `body_is_calls`: the body is tool calls, not content.
    """
    body, rules, before = BODY, [], ""
    if reasoning is not None and reasoning.name == HARMONY_REASONING:
        before, rules = "thought?", [_harmony_thought(literals)]
        if not body_is_calls:
            header = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
            body = f"{literals.terminals(header)} {BODY}"
    elif reasoning is not None:
        begin, end = reasoning.tags
        if is_special(end):
            rules = [f"thought: {ANY_TEXT} {literals.terminals(end)}"]
        else:
            rules = [f'thought[suffix="{end}"]: {ANY_TEXT}']
        opened = f"thought {GAP}"
        before = opened if starts_inside else f"({literals.terminals(begin)} {opened})?"
    if not before and not has_calls:
        return ""
    rest = f"({body} | {CALLS})" if has_calls else body
    return "\n".join([f"start: {before} {rest}", *rules])


def _harmony_thought(literals: Literals) -> str:
    begin = literals.terminals(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
    end = literals.terminals(f"<|end|>{harmony.START}assistant")
    return f"thought: {begin} {ANY_TEXT} {end}"
