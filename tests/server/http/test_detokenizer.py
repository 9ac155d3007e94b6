"""Text never holds half a character while more may come, and its pieces make up the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moed.server.detokenizer import REPLACEMENT
from moed.server.tokenizer import TextTokenizer
from tests.server.http.checkpoints import (
    END,
    START,
    TOOL_TAG,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    token_id,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family",
    "שלום עולם",
    "日本語のテキスト",
    "naïve café",
    "🎉🎉",
    "a\u200db",
    "hello world",
]


def pieces(tokenizer: TextTokenizer, ids: list[int], context: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(context, skip_special_tokens=True)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("raw", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_hard_text_comes_whole(raw: Tokenizer, text: str) -> None:
    tokenizer = TextTokenizer(raw)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = pieces(tokenizer, ids, [])
    assert "".join(found) == text
    assert not any(REPLACEMENT in piece for piece in found)


@given(st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_of_a_byte_level_tokenizer_equal_its_own_decode(ids: list[int]) -> None:
    found = pieces(TextTokenizer(BYTE_LEVEL), ids, [])
    assert "".join(found) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(st.characters(codec="utf-8"), max_size=24))
def test_any_text_of_a_byte_fallback_tokenizer_equals_its_own_decode(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    found = pieces(TextTokenizer(SENTENCEPIECE), ids, [])
    assert "".join(found) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    ids = [token_id(SENTENCEPIECE, "<0xC3>")] * 50
    found = pieces(TextTokenizer(SENTENCEPIECE), ids, [])
    assert set("".join(found)) == {REPLACEMENT}
    assert sum(map(bool, found)) > 3


def test_leading_space_of_an_output_is_kept_behind_a_prompt() -> None:
    tokenizer = TextTokenizer(SENTENCEPIECE)
    prompt = tokenizer.encode("hello", add_special_tokens=True)
    world = token_id(SENTENCEPIECE, "▁world")
    assert "".join(pieces(tokenizer, [world, world], prompt)) == " world world"
    # Alone, the decoder takes the first space for the one that the normalizer had added.
    assert "".join(pieces(tokenizer, [world], [])) == "world"


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = TextTokenizer(BYTE_LEVEL)
    ids = tokenizer.encode("é!", add_special_tokens=False)
    assert len(ids) == 3  # two bytes and "!": the training text holds no é
    assert pieces(tokenizer, ids, []) == ["", "é", "!", ""]
    assert pieces(tokenizer, ids[:1], []) == ["", REPLACEMENT]


def test_special_tokens_are_left_out_and_other_added_tokens_shown() -> None:
    tokenizer = TextTokenizer(BYTE_LEVEL)
    start, end, tag = (token_id(BYTE_LEVEL, text) for text in (START, END, TOOL_TAG))
    assert "".join(pieces(tokenizer, [start, tag, end], [])) == TOOL_TAG
    shown = tokenizer.detokenizer([], skip_special_tokens=False)
    assert [shown.add(t) for t in (start, tag, end)] == [START, TOOL_TAG, END]


def test_one_token_by_itself() -> None:
    tokenizer = TextTokenizer(BYTE_LEVEL)
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_text(first) == "bytes:\\xc3"
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(second) == "é".encode()
    pieces_of = TextTokenizer(SENTENCEPIECE)
    assert pieces_of.token_text(token_id(SENTENCEPIECE, "▁world")) == " world"
    assert pieces_of.token_text(token_id(SENTENCEPIECE, "<0xC3>")) == "bytes:\\xc3"
    assert pieces_of.token_text(token_id(SENTENCEPIECE, "</s>")) == "</s>"


def test_ids_without_a_token_add_nothing() -> None:
    tokenizer = TextTokenizer(BYTE_LEVEL)
    assert pieces(tokenizer, [399_999], []) == ["", ""]
    assert tokenizer.token_text(399_999) == ""
