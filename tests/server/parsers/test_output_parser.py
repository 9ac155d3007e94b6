"""Every format: the right parts, however the text is cut, and nothing lost when it ends early."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moed.config import chat_formats
from moed.server.parsers.events import Content, Event, Reasoning, ToolArguments, ToolStart
from moed.server.parsers.output_parser import OutputParser, ParserOptions
from moed.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from moed.server.parsers.typed_values import ToolTypes
from tests.server.parsers.answers import ANSWERS, TOOLS, Answer

TYPES = ToolTypes({name: schema.get("properties", {}) for name, schema in TOOLS.items()})


@dataclass
class Found:
    thought: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.thought += text
                case Content(text):
                    self.content += text
                case ToolStart(index, name, _):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                case ToolArguments(index, text):
                    assert index == len(self.calls) - 1 and text
                    self.calls[-1][1] += text


def options(answer: Answer, **more: Any) -> ParserOptions:
    return ParserOptions(
        tools=TOOL_FORMATS[answer.tools] if answer.tools else None,
        reasoning=REASONING_FORMATS[answer.reasoning] if answer.reasoning else None,
        starts_inside=answer.starts_inside,
        types=TYPES,
        **more,
    )


def read(answer: Answer, pieces: list[str], **more: Any) -> Found:
    parser, found = OutputParser(options(answer, **more)), Found()
    for piece in pieces:
        found.add(parser.feed(piece))
    found.add(parser.finish())
    return found


every_answer = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)


@every_answer
def test_the_parts_are_found(answer: Answer) -> None:
    found = read(answer, [answer.raw])
    assert found.thought == answer.thought
    assert found.content == answer.content
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == answer.calls


@every_answer
def test_one_character_at_a_time(answer: Answer) -> None:
    assert read(answer, list(answer.raw)) == read(answer, [answer.raw])


@every_answer
def test_every_split_in_two(answer: Answer) -> None:
    whole = read(answer, [answer.raw])
    for place in range(len(answer.raw) + 1):
        assert read(answer, [answer.raw[:place], answer.raw[place:]]) == whole, place


@every_answer
def test_an_answer_cut_anywhere_is_the_same_however_it_came(answer: Answer) -> None:
    """`max_tokens`, or a stop string inside a half-seen call."""
    for end in range(len(answer.raw)):
        raw = answer.raw[:end]
        whole = read(answer, [raw])
        assert read(answer, list(raw)) == whole, raw
        if not whole.calls and not whole.thought and answer.tools not in (None, "openai"):
            if answer.reasoning is None:
                assert whole.content == raw


@every_answer
def test_what_is_out_is_never_taken_back(answer: Answer) -> None:
    parser, found = OutputParser(options(answer)), Found()
    for character in answer.raw:
        found.add(parser.feed(character))
    early = Found(found.thought, found.content, [list(call) for call in found.calls])
    found.add(parser.finish())
    assert found.content.startswith(early.content)
    assert found.thought.startswith(early.thought)
    assert len(early.calls) <= len(found.calls)


@every_answer
def test_text_streams_before_the_end(answer: Answer) -> None:
    """A long plain answer is not held back."""
    if answer.starts_inside or answer.tools in ("openai", "llama4_pythonic"):
        return
    parser = OutputParser(options(answer))
    parser.feed("Hello, ")
    found = Found()
    found.add(parser.feed("how are you"))
    assert found.content.endswith("how are you")


PIECES = [
    *(mark for entry in TOOL_FORMATS.values() for mark in entry.markers),
    *(tag for entry in REASONING_FORMATS.values() for tag in entry.tags),
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", '{"name": "f"',
    '"arguments": {', "}", "]", "[", '"', "\\", "\n", " ", "text", "f", "to=functions.f ", ">", ",",
    "<invoke name=\"f\">", "</invoke>", "```json\n", "functions.f:0", "analysis", "é😀", ":", "1",
]  # fmt: skip


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_alike_however_it_is_cut(
    tools: str, parts: list[str], chance: random.Random
) -> None:
    raw = "".join(parts)
    answer = Answer("any", raw, tools, chance.choice([None, "qwen3"]), chance.random() < 0.3)
    places = sorted(chance.randrange(len(raw) + 1) for _ in range(5))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    whole = read(answer, [raw])
    assert read(answer, pieces) == whole
    assert read(answer, list(raw)) == whole


def test_reasoning_is_counted_with_its_tags() -> None:
    raw = "<think>a\n</think>\n\nb"
    parser = OutputParser(options(Answer("", raw, reasoning="qwen3")))
    for character in raw:
        parser.feed(character)
    parser.finish()
    counted = [parser.is_reasoning(place) for place in range(len(raw))]
    assert counted == [True] * len("<think>a\n</think>") + [False] * len("\n\nb")


def test_only_as_many_calls_as_are_wanted() -> None:
    raw = '<tool_call>{"name": "a"}</tool_call>' * 3 + "end"
    found = read(Answer("", raw, "hermes"), list(raw), max_calls=1)
    assert [name for name, _ in found.calls] == ["a"]
    assert found.content == "end"


def test_kimi_keeps_the_ids_of_the_model() -> None:
    raw = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:7"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    events = OutputParser(options(Answer("", raw, "kimi_k2"))).feed(raw)
    assert events[0] == ToolStart(0, "a.b", "functions.a.b:7")


def test_every_name_that_can_be_configured_has_a_parser() -> None:
    assert set(chat_formats.TOOL_CALL_PARSERS) == set(TOOL_FORMATS)
    assert set(chat_formats.REASONING_PARSERS) == set(REASONING_FORMATS)
    assert set(chat_formats.TOOL_CALL_SYNONYMS.values()) <= set(TOOL_FORMATS)
    assert set(chat_formats.REASONING_SYNONYMS.values()) <= set(REASONING_FORMATS)
