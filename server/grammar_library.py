"""What the front end and the engines share of llguidance: one vocabulary, one set of limits.

A grammar goes from the front end to an engine as text: JSON that llguidance reads, whatever the
client gave (a JSON schema, a regular expression, …).
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.server.tokenizer import TextTokenizer

# White space between two tokens of JSON: a space, or a line break and indentation. With more, a
# model that is unsure goes on with it until `max_tokens`.
JSON_WHITESPACE = r"(?: |\n {0,40}|\n\t{0,10})"
KINDS = ("json", "regex", "choice", "grammar", "lark")


class GrammarError(Exception):
    """A grammar that cannot be followed; the message is for the client."""


class _Tokens:
    """A vocabulary as llguidance asks for it. Reading tokenizer.json by itself, it would take every
    added token in angle brackets for a special one, which no text is.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The model's vocabulary may be padded; what a tokenizer has beyond it never comes.
        padding = [b""] * (vocab_size - tokenizer.size)
        self.tokens = [*map(tokenizer.token_bytes, range(tokenizer.size)), *padding]
        del self.tokens[vocab_size:]
        self.special_token_ids = [i for i in sorted(tokenizer.special_ids) if i < len(self.tokens)]
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        special = set(self.special_token_ids)
        plain = ((raw, i) for i, raw in enumerate(self.tokens) if raw and i not in special)
        self._id_of = dict(reversed(list(plain)))
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """How the model would write text to which there is no alternative: exactly these bytes."""
        with contextlib.suppress(UnicodeDecodeError):
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
            # Not so where a tokenizer begins every text with a space, or normalizes it.
            if b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return list(self._greedy(text))

    def _greedy(self, text: bytes) -> Iterator[int]:
        """Longest token first; stops at what no token can write."""
        place = 0
        while place < len(text):
            for end in range(min(len(text), place + self._longest), place, -1):
                if (token_id := self._id_of.get(text[place:end])) is not None:
                    yield token_id
                    place = end
                    break
            else:
                return


def make_vocabulary(model: ModelConfig) -> llguidance.LLTokenizer:
    """Takes some seconds for 150,000 tokens. Raises `GrammarError`."""
    if not model.eos_token_ids:
        raise GrammarError("this model names no end token, which structured output needs")
    try:
        tokenizer = TextTokenizer.load(model.path)
        return vocabulary_of(tokenizer, model.vocab_size, model.eos_token_ids)
    except (ModelError, ValueError) as error:
        raise GrammarError(f"structured output cannot use this tokenizer: {error}") from None


def vocabulary_of(
    tokenizer: TextTokenizer, vocab_size: int, end_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """`vocab_size`: of the model's logits; `end_ids`: what may come after a complete grammar."""
    wrapper = llguidance.TokenizerWrapper(_Tokens(tokenizer, vocab_size, end_ids))
    return llguidance.LLTokenizer(wrapper, vocab_size, list(end_ids))


def limits() -> llguidance.LLParserLimits:
    """Bounds on the work of any one grammar: some 100 ms to compile, some 10 ms for a token."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at its start. Raises `GrammarError`."""
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    check_state(matcher)
    return matcher


def check_state(matcher: llguidance.LLMatcher) -> None:
    """Raises `GrammarError` for a matcher that can go no further."""
    if matcher.is_error():
        message = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarError(message)


def to_llguidance(kind: str, source: str, outer: str, calls: str) -> str:
    """The text for the engines. `outer`: Lark rules around what is asked for, in which `@body`
    stands for it and `@calls` for `calls`, Lark rules too; or nothing. Raises `GrammarError`.
    """
    try:
        text = _convert(kind, source)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    if not outer:
        return text
    try:
        body = json.loads(text)["grammars"]
    except ValueError:
        body = [{"lark_grammar": text}]
    parts: list[dict[str, Any]] = [
        {"name": "outer", "lark_grammar": outer},
        {**body[0], "name": "body"},
        *body[1:],
    ]
    if calls:
        parts.append({"name": "calls", "lark_grammar": calls})
    return json.dumps({"grammars": parts})


def _convert(kind: str, source: str) -> str:
    if kind == "json":
        overrides: Any = {"whitespace_pattern": JSON_WHITESPACE}
        return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=overrides)
    if kind == "choice":
        words = " | ".join(json.dumps(word) for word in json.loads(source))
        return llguidance.grammar_from("lark", f"start: {words}")
    assert kind in KINDS, kind
    return llguidance.grammar_from(kind, source)  # type: ignore[arg-type]
