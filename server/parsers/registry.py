"""All formats by name, and which of them a chat template is written for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moed.config.chat_formats import AUTO, NONE
from moed.server.parsers import harmony, llama, tagged_calls, xml_calls
from moed.server.parsers.reader import Reader, Steps
from moed.server.parsers.sink import Sink
from moed.server.parsers.tool_syntax import SYNTAXES, ToolSyntax
from moed.server.parsers.typed_values import ToolTypes


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models calls tools."""

    name: str
    parse: Callable[[Reader, Sink, ToolTypes], Steps[None]]
    syntax: ToolSyntax
    """How a call must look where one is enforced."""
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens, which a decoder would leave out."""
    has_short_ids: bool = False
    """Templates of this family take ids of nine letters and digits only."""
    is_whole_answer: bool = False
    """A call has no marks of its own: an answer is calls, or none."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How one family of models marks its reasoning."""

    name: str
    tags: tuple[str, str]
    also_ends: tuple[str, ...] = ()
    assumes_inside: bool = False
    """Reasons from the first character on, unless the prompt says otherwise."""


HARMONY = "openai"
HARMONY_REASONING = "openai_gptoss"
DEEPSEEK_MARKERS = (
    *tagged_calls.DEEPSEEK_SECTION,
    *tagged_calls.DEEPSEEK_CALL,
    tagged_calls.DEEPSEEK_SEPARATOR,
)
KIMI_MARKERS = (
    *tagged_calls.KIMI_SECTION,
    *tagged_calls.KIMI_CALL,
    tagged_calls.KIMI_ARGUMENTS,
)
HERMES_MARKERS = (tagged_calls.HERMES_BEGIN, tagged_calls.HERMES_END)
GLM_MARKERS = (
    *HERMES_MARKERS,
    xml_calls.GLM_KEY,
    xml_calls.GLM_KEY_END,
    xml_calls.GLM_VALUE,
    xml_calls.GLM_VALUE_END,
)
MISTRAL_MARKERS = (
    tagged_calls.MISTRAL_BEGIN,
    tagged_calls.MISTRAL_ARGUMENTS,
    tagged_calls.MISTRAL_ID,
)
LLAMA_MARKERS = (llama.PYTHON_TAG, llama.PYTHON_START, llama.PYTHON_END)


def _harmony(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    yield from harmony.harmony(reader, sink, types, has_tools=True)


_PARSERS: Mapping[str, tuple[Callable[[Reader, Sink, ToolTypes], Steps[None]], tuple[str, ...]]] = {
    "hermes": (tagged_calls.hermes, HERMES_MARKERS),
    "qwen3_coder": (xml_calls.qwen3_coder, HERMES_MARKERS),
    "deepseek_v3": (tagged_calls.deepseek, DEEPSEEK_MARKERS),
    "deepseek_v31": (tagged_calls.deepseek, DEEPSEEK_MARKERS),
    "deepseek_v32": (xml_calls.deepseek_v32, (xml_calls.DSML,)),
    "glm45": (xml_calls.glm45, GLM_MARKERS),
    "kimi_k2": (tagged_calls.kimi, KIMI_MARKERS),
    "minimax_m2": (xml_calls.minimax_m2, xml_calls.MINIMAX.section),
    "mistral": (tagged_calls.mistral, MISTRAL_MARKERS),
    HARMONY: (_harmony, harmony.MARKERS),
    "llama3_json": (llama.llama_json, LLAMA_MARKERS),
    "llama4_json": (llama.llama_json, LLAMA_MARKERS),
    "llama4_pythonic": (llama.pythonic, LLAMA_MARKERS),
    "pythonic": (llama.pythonic, LLAMA_MARKERS),
}
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    name: ToolFormat(
        name,
        parse,
        SYNTAXES[name],
        markers,
        has_short_ids=name == "mistral",
        is_whole_answer=markers is LLAMA_MARKERS,
    )
    for name, (parse, markers) in _PARSERS.items()
}

THINK_TAGS = ("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    entry.name: entry
    for entry in (
        ReasoningFormat("qwen3", THINK_TAGS),
        ReasoningFormat("deepseek_r1", THINK_TAGS, assumes_inside=True),
        ReasoningFormat("deepseek_v3", THINK_TAGS),
        ReasoningFormat("glm45", THINK_TAGS),
        ReasoningFormat("kimi_k2", THINK_TAGS, also_ends=(tagged_calls.KIMI_SECTION[0],)),
        ReasoningFormat("minimax_m2", THINK_TAGS),
        ReasoningFormat("mistral", ("[THINK]", "[/THINK]")),
        ReasoningFormat("seed_oss", ("<seed:think>", "</seed:think>")),
        # Its channels are read together with its calls.
        ReasoningFormat(HARMONY_REASONING, (harmony.CHANNEL, "<|end|>")),
    )
}

# What only a template of that family holds; the first that fits counts.
_TOOL_MARKS = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v32", (xml_calls.DSML,)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ('"parameters"', "<|python_tag|>")),
)
_REASONING_OF_TOOLS = {
    "kimi_k2": "kimi_k2",
    "glm45": "glm45",
    "minimax_m2": "minimax_m2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
}


def tool_format(name: str, template: str) -> ToolFormat | None:
    """By name, or the one that `template` is written for."""
    if name == NONE:
        return None
    if name != AUTO:
        return TOOL_FORMATS[name]
    for found, marks in _TOOL_MARKS:
        if all(mark in template for mark in marks):
            return TOOL_FORMATS[found]
    return None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """By name, or the one that `template` is written for."""
    if name == NONE:
        return None
    if name != AUTO:
        return REASONING_FORMATS[name]
    tools = tool_format(AUTO, template)
    if tools is not None and tools.name == HARMONY:
        return REASONING_FORMATS[HARMONY_REASONING]
    for found in ("mistral", "seed_oss"):
        if REASONING_FORMATS[found].tags[1] in template:
            return REASONING_FORMATS[found]
    if THINK_TAGS[1] not in template:
        return None
    return REASONING_FORMATS[_REASONING_OF_TOOLS.get(tools.name if tools else "", "qwen3")]
