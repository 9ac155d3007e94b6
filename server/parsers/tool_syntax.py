"""How each family of models writes its calls, as a few literal texts: for where one is enforced.

`{name}` stands for the tool's name, `{json_name}` for it inside a JSON string, `{index}` for the
call's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
