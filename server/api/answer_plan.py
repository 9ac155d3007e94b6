"""What a chat's answer may hold, and how it is to be read: decided before it is generated."""

from collections.abc import Sequence
from dataclasses import dataclass

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.bodies.conversation import AllowedToolsChoice, NamedTool, Tool
from moed.server.api.errors import InvalidRequest
from moed.server.api.reasoning_limit import reasoning_limit
from moed.server.api.state import TextTools
from moed.server.api.structured import Asked
from moed.server.grammar_checker import Question
from moed.server.messages import ReasoningLimit
from moed.server.parsers.answer_syntax import answer_grammar
from moed.server.parsers.output_parser import ParserOptions
from moed.server.parsers.registry import (
    HARMONY_REASONING,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from moed.server.parsers.tagged_calls import MISTRAL_ARGUMENTS
from moed.server.parsers.tool_grammar import Literals, calls_grammar, free_grammar
from moed.server.parsers.tool_syntax import (
    MISTRAL_WITH_ARGUMENT_MARK,
    ToolSpec,
    ToolSyntax,
)
from moed.server.parsers.typed_values import ToolTypes

ANY = {"type": "object"}


@dataclass(frozen=True)
class AnswerPlan:
    """How one request's answers are read, and what they must follow."""

    options: ParserOptions
    shown: frozenset[int]
    """Special tokens that the parser reads."""
    question: Question | None
    """The grammar of the whole answer, where there is one."""
    param: str
    """What to blame for it."""
    notes: tuple[str, ...]
    """What the client should know of its tools, and of its budget."""
    limit: ReasoningLimit | None


def offered_tools(body: ChatBody) -> list[Tool]:
    """The tools that the model is told of: all, or those that it may choose from. Raises
    `InvalidRequest` for a choice among none.
    """
    choice, tools = body.tool_choice, body.tools or []
    if choice == "none":
        return []
    if not tools and (_is_enforced(body) or isinstance(choice, AllowedToolsChoice)):
        raise InvalidRequest(
            "tool_choice asks for a call, and tools names no tool to call",
            param="tool_choice",
            code="invalid_value",
        )
    if isinstance(choice, NamedTool):
        _check_names([choice], tools)
    if isinstance(choice, AllowedToolsChoice):
        _check_names(choice.allowed_tools.tools, tools)
        allowed = {named.function.name for named in choice.allowed_tools.tools}
        return [tool for tool in tools if tool.function.name in allowed]
    return tools


def _check_names(chosen: Sequence[NamedTool], tools: Sequence[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    for named in chosen:
        if named.function.name not in names:
            shown = ", ".join(name[:60] for name in names[:20])
            raise InvalidRequest(
                f"tool_choice names {named.function.name[:100]!r}, which is not among the tools: "
                f"{shown}",
                param="tool_choice",
                code="invalid_value",
            )


def plan_answer(
    body: ChatBody, tools: Sequence[Tool], prompt: str, asked: Asked | None, text: TextTools
) -> AnswerPlan:
    """`prompt`: the rendered conversation; `tools`: those offered. Raises `InvalidRequest`."""
    form = text.tool_format if tools else None
    continues = bool(body.continue_final_message)
    reasoning, starts_inside = _reasoning(text.reasoning_format, prompt, continues)
    if reasoning is not None and reasoning.name == HARMONY_REASONING:
        markers = TOOL_FORMATS["openai"].markers
    else:
        markers = (*(form.markers if form else ()), *(reasoning.tags if reasoning else ()))
    special_ids = {
        marker: token_id
        for marker in markers
        if (token_id := text.tokenizer.special_id(marker)) is not None
    }
    literals = Literals(special_ids)
    is_several = body.parallel_tool_calls is not False
    is_enforced = bool(tools) and _is_enforced(body)
    if is_enforced and form is None:
        raise InvalidRequest(
            "tool_choice asks for a call, and how this model calls tools is not known; the server "
            "can be told with --tool-call-parser",
            param="tool_choice",
            code="unsupported_value",
        )
    calls, is_bound = "", is_enforced
    if form is not None:
        syntax = _syntax(form.syntax, text)
        if is_enforced or asked is not None:
            calls = calls_grammar(syntax, _specs(body, tools), literals, several=is_several)
        elif syntax.mark is not None and any(tool.function.strict for tool in tools):
            is_bound = True
            calls = free_grammar(syntax, _strict_specs(tools), literals, several=is_several)
    question = None
    if is_bound or asked is not None:
        outer = answer_grammar(
            reasoning,
            literals,
            lambda marker: marker in special_ids,
            starts_inside=starts_inside,
            body_is_calls=is_bound,
            has_calls=bool(calls) and not is_bound,
        )
        if is_bound:
            question = Question("lark", calls, outer)
        elif asked is not None:
            question = Question(asked.kind, asked.source, outer, calls)
    options = ParserOptions(
        tools=form,
        reasoning=reasoning,
        starts_inside=starts_inside,
        types=_types(tools),
        max_calls=None if is_several else 1,
    )
    param = "tools" if is_bound or asked is None else asked.param
    limit, more = reasoning_limit(body, reasoning, text.tokenizer, starts_inside=starts_inside)
    notes = (*_notes(form, tools, is_bound or asked is not None), *more)
    return AnswerPlan(options, frozenset(special_ids.values()), question, param, notes, limit)


def _notes(form: ToolFormat | None, tools: Sequence[Tool], is_bound: bool) -> tuple[str, ...]:
    if tools and form is None:
        return ("how this model calls tools is not known here: its calls come as text",)
    if any(tool.function.strict for tool in tools) and not is_bound:
        return (
            "strict tools of this model are held to their schemas only where they are required",
        )
    return ()


def _is_enforced(body: ChatBody) -> bool:
    choice = body.tool_choice
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _reasoning(
    form: ReasoningFormat | None, prompt: str, continues: bool
) -> tuple[ReasoningFormat | None, bool]:
    """Whether there may be reasoning, and whether the prompt has begun it. `continues`: its end is
    the beginning of the answer.
    """
    if form is None:
        return None, False
    if form.name == HARMONY_REASONING:
        return form, False
    begin, end = form.tags
    if continues:
        is_open = prompt.rfind(begin) > prompt.rfind(end)
        return (form, True) if is_open else (None, False)
    ending = prompt.rstrip()
    if ending.endswith(end):
        return None, False  # the template has switched it off
    return form, ending.endswith(begin) or form.assumes_inside


def _syntax(syntax: ToolSyntax, text: TextTools) -> ToolSyntax:
    """Mistral's templates differ within the family."""
    source = "" if text.chat_template is None else text.chat_template.source
    is_newer = syntax is TOOL_FORMATS["mistral"].syntax and MISTRAL_ARGUMENTS in source
    return MISTRAL_WITH_ARGUMENT_MARK if is_newer else syntax


def _specs(body: ChatBody, tools: Sequence[Tool]) -> list[ToolSpec]:
    """The tools that may be called."""
    choice = body.tool_choice
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    return [
        ToolSpec(tool.function.name, tool.function.parameters)
        for tool in tools
        if wanted in (None, tool.function.name)
    ]


def _strict_specs(tools: Sequence[Tool]) -> list[ToolSpec]:
    """All tools; arguments of those that are not strict may be any object."""
    return [
        ToolSpec(tool.function.name, tool.function.parameters if tool.function.strict else ANY)
        for tool in tools
    ]


def _types(tools: Sequence[Tool]) -> ToolTypes:
    found = {}
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        found[tool.function.name] = properties if isinstance(properties, dict) else {}
    return ToolTypes(found)
