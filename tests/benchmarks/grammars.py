"""Libraries that turn a grammar into masks of allowed tokens: time to compile, time per token.

    python -m tests.benchmarks.grammars [--vocabulary FILE] [--rounds 5]

`FILE` is a tokenizer.json; without it, that of the bundled model with its 768 tokens. Each grammar
is compiled without any cache and then followed along an example text, one mask per token. Prints
milliseconds to make the vocabulary ready once and to compile a grammar (median), and microseconds
per mask (median, 99th percentile, largest; all rounds together). Takes the libraries that are
installed: moed has llguidance, and `pip install xgrammar` adds the other.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moed.config.model import bundled_checkpoint
from moed.server.grammar_library import vocabulary_of
from moed.server.tokenizer import TextTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "minLength": 1, "maxLength": 60},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "IL", "US", "JP"]},
            },
            "required": ["street", "zip", "country"],
            "additionalProperties": False,
        }
    },
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "address": {"$ref": "#/$defs/address"},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 20,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string"},
                    "price": {"type": "number"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["sku", "price", "note"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "address", "lines"],
    "additionalProperties": False,
}
ORDER_TEXT = (
    '{"id": "3f2b8c6e-1d2a-4b5c-9e8f-0a1b2c3d4e5f", "address": {"street": "12 Long Lane, near the '
    'old mill", "zip": "10115", "country": "DE"}, "lines": [{"sku": "A-17", "price": 12.5, "note": '
    '"handle with care, it is fragile"}, {"sku": "B-2", "price": 3, "note": null}]}'
)
TOOLS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{index}"},
                "arguments": {
                    "type": "object",
                    "properties": {
                        f"field_{index}": {"type": "string"},
                        "count": {"type": "integer"},
                    },
                    "required": [f"field_{index}", "count"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index in range(64)
    ]
}
FREE_TEXT = json.dumps({"a": [1, 2.5, {"text": "The quick brown fox, and so on. " * 8}], "b": None})
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    """"json" or "regex"."""
    source: str
    text: str


CASES = (
    Case("any object", "json", json.dumps({"type": "object"}), FREE_TEXT),
    Case(
        "person",
        "json",
        json.dumps(PERSON),
        '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematician", "writer"]}',
    ),
    Case("order", "json", json.dumps(ORDER), ORDER_TEXT),
    Case(
        "64 tools",
        "json",
        json.dumps(TOOLS),
        '{"name": "tool_41", "arguments": {"field_41": "some words here", "count": 7}}',
    ),
    Case("date", "regex", DATE, "2026-11-30T23:59:59Z"),
)


class Vocabulary:
    """A tokenizer.json, as each library wants it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.tokenizer = TextTokenizer.load(str(path.parent))
        self.tokens = [self.tokenizer.token_bytes(token) for token in range(self.tokenizer.size)]
        self.end_id = max(self.tokenizer.special_ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Matcher(Protocol):
    def mask(self) -> None:
        """The allowed tokens, one bit each, into a buffer that is kept."""
        ...

    def accept(self, token_id: int) -> bool: ...


Compile = Callable[[Case], Matcher]


class LlGuidanceMatcher:
    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._buffer = torch.empty(words, dtype=torch.int32)

    def mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._buffer.data_ptr(), self._buffer.nbytes)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))


def llguidance_compiler(vocabulary: Vocabulary) -> Compile:
    import llguidance

    size = len(vocabulary.tokens)
    tokenizer = vocabulary_of(vocabulary.tokenizer, size, [vocabulary.end_id])

    def compile(case: Case) -> Matcher:
        grammar = llguidance.grammar_from(case.kind, case.source)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return LlGuidanceMatcher(matcher, (size + 31) // 32)

    return compile


class XGrammarMatcher:
    def __init__(self, matcher: Any, buffer: torch.Tensor) -> None:
        self._matcher, self._buffer = matcher, buffer

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._buffer)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def xgrammar_compiler(vocabulary: Vocabulary) -> Compile:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        vocabulary.tokens, xgrammar.VocabType.RAW, stop_token_ids=[vocabulary.end_id]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(case: Case) -> Matcher:
        if case.kind == "json":
            compiled = compiler.compile_json_schema(case.source, strict_mode=False)
        else:
            compiled = compiler.compile_regex(case.source)
        buffer = xgrammar.allocate_token_bitmask(1, len(vocabulary.tokens))
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), buffer)

    return compile


LIBRARIES = {"llguidance": llguidance_compiler, "xgrammar": xgrammar_compiler}


def milliseconds(since: float) -> float:
    return (time.perf_counter() - since) * 1e3


def measure(compile: Compile, case: Case, token_ids: Sequence[int], rounds: int) -> str:
    compile_ms: list[float] = []
    mask_us: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        matcher = compile(case)
        compile_ms.append(milliseconds(started))
        for token_id in token_ids:
            started = time.perf_counter()
            matcher.mask()
            mask_us.append(milliseconds(started) * 1e3)
            assert matcher.accept(token_id), (case.name, token_id)
    mask_us.sort()
    return (
        f"{statistics.median(compile_ms):12.2f} {statistics.median(mask_us):10.1f} "
        f"{mask_us[int(len(mask_us) * 0.99)]:10.1f} {mask_us[-1]:10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bundled = pathlib.Path(bundled_checkpoint()) / "tokenizer.json"
    parser.add_argument("--vocabulary", type=pathlib.Path, default=bundled)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    vocabulary = Vocabulary(arguments.vocabulary)
    texts = {case.name: vocabulary.encode(case.text) for case in CASES}
    print(f"{len(vocabulary.tokens)} tokens, {arguments.rounds} rounds")
    print(f"{'':26}{'compile ms':>12} {'mask us':>10} {'p99 us':>10} {'max us':>10}")
    for name, prepare in LIBRARIES.items():
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        started = time.perf_counter()
        compile = prepare(vocabulary)
        print(f"{name}: vocabulary ready in {milliseconds(started):.0f} ms")
        for case in CASES:
            label = f"  {case.name} ({len(texts[case.name])} tokens)"
            print(f"{label:26}{measure(compile, case, texts[case.name], arguments.rounds)}")


if __name__ == "__main__":
    main()
