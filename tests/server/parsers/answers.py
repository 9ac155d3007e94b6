"""Raw answers as models of each family write them, and what is in them, worked out by hand."""

from dataclasses import dataclass, field
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "fine": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": {"type": "object"}}


@dataclass(frozen=True)
class Answer:
    """`raw`, read by the formats named, gives the rest."""

    name: str
    raw: str
    tools: str | None = None
    reasoning: str | None = None
    starts_inside: bool = False
    thought: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names and parsed arguments."""


PARIS = {"city": "Paris"}
# What breaks parsers: braces and brackets in strings, escapes, tags in strings, other scripts.
NASTY = {"city": 'a "b" {1,2 [ \\ </tool_call> שלום 😀', "tags": ["}", "]{", "\n"]}
NASTY_JSON = (
    '{"city": "a \\"b\\" {1,2 [ \\\\ </tool_call> שלום \\ud83d\\ude00", "tags": ["}", "]{", "\\n"]}'
)

HERMES = [
    Answer(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "hermes",
        calls=[("get_weather", PARIS)],
    ),
    Answer(
        "hermes, content and two calls",
        'I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "hermes",
        content="I will look.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Answer(
        "hermes, arguments first",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call> done',
        "hermes",
        content="done",
        calls=[("get_weather", PARIS)],
    ),
    Answer(
        "hermes, nasty",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {NASTY_JSON}}}\n</tool_call>',
        "hermes",
        calls=[("get_weather", NASTY)],
    ),
    Answer(
        "hermes, no arguments",
        '<tool_call>\n{"name": "now"}\n</tool_call>',
        "hermes",
        calls=[("now", {})],
    ),
    Answer(
        "hermes, no closing tag",
        '<tool_call>\n{"name": "now", "arguments": {"a": [1, {"b": null}]}}',
        "hermes",
        calls=[("now", {"a": [1, {"b": None}]})],
    ),
    Answer(
        "hermes, never a call",
        'a < b <tool <tool_call> no {"x": 1} \n',
        "hermes",
        content='a < b <tool <tool_call> no {"x": 1} \n',
    ),
    Answer(
        "hermes, cut in the name",
        'so:\n<tool_call>\n{"name": "get_w',
        "hermes",
        content='so:\n<tool_call>\n{"name": "get_w',
    ),
    Answer("plain", "  spaces are kept \n", "hermes", content="  spaces are kept \n"),
    Answer("no format", "<tool_call> <think>\n", content="<tool_call> <think>\n"),
]

REASONING = [
    Answer(
        "qwen3",
        "<think>\nFirst this.\n\nThen that.\n</think>\n\nThe answer.\n",
        reasoning="qwen3",
        thought="First this.\n\nThen that.",
        content="The answer.\n",
    ),
    Answer(
        "opened by the prompt",
        "Hm, so\n</think>\n\nYes.",
        reasoning="qwen3",
        starts_inside=True,
        thought="Hm, so",
        content="Yes.",
    ),
    Answer(
        "opened by the prompt and again",
        "<think>Hm</think>Yes.",
        reasoning="deepseek_r1",
        starts_inside=True,
        thought="Hm",
        content="Yes.",
    ),
    Answer("no reasoning", "Just <think> this.", reasoning="qwen3", content="Just <think> this."),
    Answer("never closed", "<think>on and on ", reasoning="qwen3", thought="on and on"),
    Answer("empty", "<think>\n\n</think>\n\nHi", reasoning="qwen3", content="Hi"),
    Answer(
        "with a call",
        '<think>\nI need <tool_call> maybe.\n</think>\n\n<tool_call>\n{"name": "now", '
        '"arguments": {}}\n</tool_call>',
        "hermes",
        "qwen3",
        thought="I need <tool_call> maybe.",
        calls=[("now", {})],
    ),
    Answer(
        "mistral",
        "[THINK]Hm.[/THINK]Yes.",
        "mistral",
        "mistral",
        thought="Hm.",
        content="Yes.",
    ),
]

QWEN3_CODER = [
    Answer(
        "qwen3 coder",
        "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=fine>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        "qwen3_coder",
        content="Let me see.",
        calls=[
            ("get_weather", {"city": "Paris", "days": 3, "fine": True, "tags": ["a", "b"]}),
        ],
    ),
    Answer(
        "qwen3 coder, text of several lines",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\n\n  if a < b:\n\t"x" </param\n\n'
        "</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "qwen3_coder",
        calls=[
            ("get_weather", {"city": '\n  if a < b:\n\t"x" </param\n', "note": None}),
            ("now", {}),
        ],
    ),
    Answer(
        "qwen3 coder, no outer tag",
        "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=other>\n1.5\n"
        "</parameter>\n</function>",
        "qwen3_coder",
        calls=[("get_weather", {"city": "12", "other": 1.5})],
    ),
    Answer(
        "qwen3 coder, not a call",
        "<tool_call>\nhello",
        "qwen3_coder",
        content="<tool_call>\nhello",
    ),
]

GLM = [
    Answer(
        "glm",
        "<think>ok</think>\nSure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>New York </arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        "glm45",
        "glm45",
        thought="ok",
        content="Sure.",
        calls=[("get_weather", {"city": "New York ", "days": 2}), ("now", {})],
    ),
    Answer(
        "glm on one line",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call>",
        "glm45",
        calls=[("get_weather", {"city": "Rom"})],
    ),
]

MINIMAX = [
    Answer(
        "minimax",
        'plan\n</think>\n\nOn it.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">San Francisco</parameter>\n<parameter name="tags">["x"]</parameter>'
        '\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "minimax_m2",
        "minimax_m2",
        starts_inside=True,
        thought="plan",
        content="On it.",
        calls=[("get_weather", {"city": "San Francisco", "tags": ["x"]}), ("now", {})],
    ),
    Answer(
        "deepseek v3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
        'name="city" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">5'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "deepseek_v32",
        calls=[("get_weather", {"city": "5", "days": 5})],
    ),
]

DEEPSEEK = [
    Answer(
        "deepseek v3",
        "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        "```json\n" + NASTY_JSON + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3",
        content="Looking.",
        calls=[("get_weather", NASTY), ("now", {})],
    ),
    Answer(
        "deepseek v3.1",
        "why</think>Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31",
        "deepseek_v3",
        starts_inside=True,
        thought="why",
        content="Looking.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
]

KIMI = [
    Answer(
        "kimi",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
        content="Sure.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Answer(
        "kimi thinks and calls at once",
        "I call<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
        "kimi_k2",
        starts_inside=True,
        thought="I call",
        calls=[("now", {})],
    ),
]

MISTRAL = [
    Answer(
        "mistral, an array",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", '
        '"arguments": {}}]',
        "mistral",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Answer(
        "mistral, names and arguments",
        'Yes. [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "mistral",
        content="Yes.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Answer(
        "mistral with an id",
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
        "mistral",
        calls=[("get_weather", PARIS)],
    ),
    Answer(
        "mistral, brackets in the text",
        "a[0] is [TOOL] [TOOL_CALLS",
        "mistral",
        content="a[0] is [TOOL] [TOOL_CALLS",
    ),
]

HARMONY = [
    Answer(
        "gpt-oss",
        "<|channel|>analysis<|message|>The user wants it.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Here: 1 < 2.\n",
        "openai",
        "openai_gptoss",
        thought="The user wants it.",
        content="Here: 1 < 2.\n",
    ),
    Answer(
        "gpt-oss calls",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        "openai",
        "openai_gptoss",
        thought="Need weather.",
        calls=[("get_weather", PARIS)],
    ),
    Answer(
        "gpt-oss, recipient before the channel",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "openai",
        "openai_gptoss",
        content="I will look.",
        calls=[("now", {})],
    ),
]

HARMONY += [
    Answer(
        "gpt-oss leaves the namespace out",
        '<|channel|>commentary to=now <|constrain|>json<|message|>{"a": 1}<|call|>',
        "openai",
        "openai_gptoss",
        calls=[("now", {"a": 1})],
    ),
    Answer(
        "gpt-oss calls a tool of its own",
        '<|channel|>analysis to=browser.search code<|message|>{"q": 1}<|call|>',
        "openai",
        "openai_gptoss",
        thought='{"q": 1}',
    ),
]

LLAMA = [
    Answer(
        "llama json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", '
        '"parameters": {}}',
        "llama3_json",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Answer(
        "llama, python tag",
        '<|python_tag|>{"name": "now", "parameters": {}}',
        "llama3_json",
        calls=[("now", {})],
    ),
    Answer("llama text", "Hello { there", "llama3_json", content="Hello { there"),
    Answer("llama json that is no call", '{"a": 1}', "llama3_json", content='{"a": 1}'),
    Answer(
        "pythonic",
        '[get_weather(city="Paris", days=2), now()]',
        "llama4_pythonic",
        calls=[("get_weather", {"city": "Paris", "days": 2}), ("now", {})],
    ),
    Answer(
        "pythonic between tags",
        "<|python_start|>[get_weather(city='[]', fine=False)]<|python_end|>",
        "llama4_pythonic",
        calls=[("get_weather", {"city": "[]", "fine": False})],
    ),
    Answer("pythonic list", "[1, 2] is a list", "llama4_pythonic", content="[1, 2] is a list"),
    Answer("pythonic text", "Hi.", "pythonic", content="Hi."),
]

ANSWERS = [
    *HERMES,
    *REASONING,
    *QWEN3_CODER,
    *GLM,
    *MINIMAX,
    *DEEPSEEK,
    *KIMI,
    *MISTRAL,
    *HARMONY,
    *LLAMA,
]
