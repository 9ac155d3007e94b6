"""Enforced calls: whatever the model wants, what comes out is read back as calls that fit."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken

from moed.config.engine_config import ModelConfig
from moed.server.detokenizer import ByteLevelDetokenizer
from moed.server.grammar_library import compile_grammar, make_vocabulary, to_llguidance
from moed.server.grammar_masks import unpack
from moed.server.parsers.events import Content, Reasoning, ToolArguments, ToolStart
from moed.server.parsers.output_parser import OutputParser, ParserOptions
from moed.server.parsers.registry import TOOL_FORMATS, reasoning_format, tool_format
from moed.server.parsers.tool_grammar import Literals, calls_grammar, free_grammar
from moed.server.parsers.tool_syntax import MISTRAL_WITH_ARGUMENT_MARK, ToolSpec, ToolSyntax
from moed.server.parsers.typed_values import ToolTypes
from moed.server.tokenizer import TextTokenizer
from tests.server.http.checkpoints import END, byte_level_tokenizer, token_id, write_checkpoint
from tests.server.http.configs import frontend_config

SHORT = {"type": "string", "maxLength": 4}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"], "type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "say": {
        "type": "object",
        "properties": {"text": SHORT},
        "required": ["text"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
# Free text between tags: nothing but the closing tag bounds it.
FREE_TEXT = {"qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"}
TYPES = ToolTypes({name: schema["properties"] for name, schema in SCHEMAS.items()})
SPECIAL = [
    *{
        marker
        for name in ("openai", "kimi_k2", "mistral")
        for marker in TOOL_FORMATS[name].markers
        if marker != "<|return|>"
    }
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in sorted(SPECIAL)])
    folder: pathlib.Path = write_checkpoint(tmp_path_factory.mktemp("marks"), tokenizer)
    size = tokenizer.get_vocab_size()
    eos = (token_id(tokenizer, END),)
    return frontend_config(folder, vocab_size=size, eos_token_ids=eos).model


@pytest.fixture(scope="module")
def write(model: ModelConfig) -> Callable[[str, int], str]:
    """`write(grammar, seed)`: a random text that it allows."""
    vocabulary = make_vocabulary(model)
    tokenizer = TextTokenizer.load(model.path)
    device = torch.device("cpu")

    def work(grammar: str, seed: int) -> str:
        matcher = compile_grammar(vocabulary, grammar)
        generator = torch.Generator().manual_seed(seed)
        text = ByteLevelDetokenizer(tokenizer.token_bytes, frozenset())
        written = ""
        for _ in range(8000):
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
            allowed = unpack(bits[None], device)[0].nonzero()[:, 0]
            ends = [e for e in model.eos_token_ids if e in allowed.tolist()]
            if ends and (len(allowed) == 1 or torch.rand(1, generator=generator) < 0.3):
                return written + text.flush()
            choice = int(torch.randint(len(allowed), (1,), generator=generator))
            token = int(allowed[choice])
            if token in model.eos_token_ids:
                continue
            assert matcher.consume_token(token)
            written += text.add(token)
        raise AssertionError(f"it does not end: {written[:500]!r}")

    return work


def literals(model: ModelConfig) -> Literals:
    tokenizer = TextTokenizer.load(model.path)
    return Literals({text: tokenizer.special_id(text) or 0 for text in SPECIAL})


def check_calls(raw: str, tools: str) -> list[str]:
    """The names that were called, after a look at all arguments."""
    options = ParserOptions(TOOL_FORMATS[tools], None, types=TYPES)
    parser = OutputParser(options)
    events = [event for character in raw for event in parser.feed(character)] + parser.finish()
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case ToolStart(_, name, _):
                names.append(name)
                arguments.append("")
            case ToolArguments(_, text):
                arguments[-1] += text
            case Content(text) | Reasoning(text):
                raise AssertionError(f"{text!r} is no call, in {raw!r}")
    for name, text in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    return names


def specs(*names: str) -> list[ToolSpec]:
    return [ToolSpec(name, SCHEMAS[name]) for name in names]


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_enforced_calls_are_read_back(
    model: ModelConfig, write: Callable[[str, int], str], tools: str
) -> None:
    syntax = TOOL_FORMATS[tools].syntax
    offered = ("get_weather", "now") if tools in FREE_TEXT else tuple(SCHEMAS)
    read_by = {"llama4_pythonic": "llama4_json", "pythonic": "llama4_json"}.get(tools, tools)
    for several in (False, True):
        lark = calls_grammar(syntax, specs(*offered), literals(model), several=several)
        grammar = to_llguidance("lark", lark, outer="", calls="")
        counts = []
        for seed in range(6):
            names = check_calls(write(grammar, seed), read_by)
            assert names
            counts.append(len(names))
        assert several or set(counts) == {1}


@pytest.mark.parametrize("tools", sorted(FREE_TEXT))
def test_free_text_ends_with_its_tag(model: ModelConfig, tools: str) -> None:
    """Anything may stand in it, its own line breaks and quotes too."""
    syntax = TOOL_FORMATS[tools].syntax
    assert syntax.parameter is not None
    lark = calls_grammar(syntax, specs("say"), literals(model), several=False)
    vocabulary = make_vocabulary(model)
    raw = (
        syntax.section[0]
        + syntax.head.replace("{name}", "say")
        + syntax.parameter[0].replace("{key}", "text").replace("{is_string}", "true")
        + 'a "b"\n<x> c'
        + syntax.parameter[1]
        + syntax.tail
        + syntax.section[1]
    )
    matcher = compile_grammar(vocabulary, to_llguidance("lark", lark, outer="", calls=""))
    tokens = TextTokenizer.load(model.path).encode(raw, add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    parser = OutputParser(ParserOptions(TOOL_FORMATS[tools], None, types=TYPES))
    events = [*parser.feed(raw), *parser.finish()]
    text = "".join(event.text for event in events if isinstance(event, ToolArguments))
    assert json.loads(text) == {"text": 'a "b"\n<x> c'}


MARKED = [name for name, entry in TOOL_FORMATS.items() if entry.syntax.mark is not None]


@pytest.mark.parametrize("tools", MARKED)
def test_calls_after_any_text_are_bound_all_the_same(
    model: ModelConfig, write: Callable[[str, int], str], tools: str
) -> None:
    syntax = TOOL_FORMATS[tools].syntax
    mark = syntax.mark or ""
    offered = ("get_weather", "now")
    lark = free_grammar(syntax, specs(*offered), literals(model), several=True)
    vocabulary, tokenizer = make_vocabulary(model), TextTokenizer.load(model.path)
    compiled = compile_grammar(vocabulary, to_llguidance("lark", lark, outer="", calls=""))

    def allows(text: str) -> bool:
        matcher = compiled.deep_copy()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    for text in ("", "Hello { [ there", mark[:-1] + "\n ..."):
        assert allows(text), text
    assert not allows(f"so: {mark}") and not allows(f"so: {mark} anything {mark}")
    bound = calls_grammar(syntax, specs(*offered), literals(model), several=True)
    for seed in range(4):
        calls = write(to_llguidance("lark", bound, outer="", calls=""), seed)
        assert allows(calls) and allows(f"First,\n{calls}")
        assert not allows(calls.replace("get_weather", "get_whatever").replace("now", "nowhere"))


def test_newer_mistral(model: ModelConfig, write: Callable[[str, int], str]) -> None:
    syntax: ToolSyntax = MISTRAL_WITH_ARGUMENT_MARK
    lark = calls_grammar(syntax, specs("say", "now"), literals(model), several=True)
    for seed in range(4):
        assert check_calls(write(to_llguidance("lark", lark, outer="", calls=""), seed), "mistral")


def test_special_tokens_stand_by_their_ids() -> None:
    marks = Literals({"<|a|>": 7})
    assert marks.terminals('x<|a|>"y"') == r'"x" <[7]> "\"y\""'
    assert Literals({}).terminals("<|a|>") == '"<|a|>"'


TEMPLATES = {
    "hermes": '<tool_call>\n{"name": …',
    "qwen3_coder": "<tool_call>\n<function=…>\n<parameter=…>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…",
    "deepseek_v32": "{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}invoke",
    "glm45": "<tool_call>…<arg_key>…</arg_key>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax_m2": "<minimax:tool_call><invoke",
    "mistral": "[TOOL_CALLS]",
    "openai": "<|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_recognised(name: str) -> None:
    found = tool_format("auto", TEMPLATES[name])
    assert found is not None and found.name == name


def test_reasoning_is_recognised() -> None:
    assert reasoning_format("auto", "{{ content }}") is None
    for template, expected in (
        ("… '</think>' in content", "qwen3"),
        (TEMPLATES["kimi_k2"] + "</think>", "kimi_k2"),
        (TEMPLATES["openai"], "openai_gptoss"),
        ("[THINK][/THINK]", "mistral"),
    ):
        found = reasoning_format("auto", template)
        assert found is not None and found.name == expected
    assert tool_format("none", TEMPLATES["hermes"]) is None
    assert reasoning_format("none", "</think>") is None
