"""Text with tags in it: what the grammar library lets a model write."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from moed.server.grammar_library import (
    GrammarError,
    compile_grammar,
    make_vocabulary,
    to_llguidance,
)
from moed.server.parsers.structural_tags import StructuralTag, structural_grammar
from moed.server.parsers.tool_grammar import Literals
from moed.server.tokenizer import TextTokenizer
from tests.server.http.checkpoints import END, byte_level_tokenizer, token_id, write_checkpoint
from tests.server.http.configs import frontend_config

MARK = "<|call|>"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
GET = StructuralTag("<function=get>", SCHEMA, "</function>")
PUT = StructuralTag("<function=put>", {"type": "integer"}, "</function>")
CALL = StructuralTag(f"{MARK}call ", SCHEMA, "\n")
TOOL = StructuralTag("<tool/\n", SCHEMA, "")

Allows = Callable[[str], bool]


@pytest.fixture(scope="module")
def allowed_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Allows]:
    plain = byte_level_tokenizer()
    plain.add_special_tokens([AddedToken(MARK, special=True)])
    folder: pathlib.Path = write_checkpoint(tmp_path_factory.mktemp("tags"), plain)
    eos = (token_id(plain, END),)
    config = frontend_config(folder, vocab_size=plain.get_vocab_size(), eos_token_ids=eos)
    vocabulary, tokenizer = make_vocabulary(config.model), TextTokenizer.load(str(folder))
    literals = Literals({MARK: token_id(plain, MARK)})

    def make(tags: list[StructuralTag], triggers: list[str], **ends: bool) -> Allows:
        shape = {"at_least_one": False, "stops_after_first": False, **ends}
        lark = structural_grammar(tags, triggers, literals, **shape)
        compiled = compile_grammar(vocabulary, to_llguidance("lark", lark, outer="", calls=""))

        def allows(text: str) -> bool:
            matcher = compiled.deep_copy()
            tokens = tokenizer.encode(text, add_special_tokens=False)
            return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

        return allows

    return make


def test_text_is_free_until_it_comes_to_a_trigger(allowed_by: Callable[..., Allows]) -> None:
    allows = allowed_by([GET, PUT], ["<function="])
    tag = '<function=get>{"a": 1}</function>'
    for text in ("", "any { text < at all", tag, f"so: {tag}", f"{tag} and {tag}\nfine"):
        assert allows(text), text
    assert allows("<function=put>7</function>")
    for text in (
        "<function=",
        "so <function=drop>{}</function>",
        '<function=get>{"a": "x"}</function>',
        '<function=put>{"a": 1}</function>',
        f"{tag} <function=get>",
    ):
        assert not allows(text), text


def test_several_triggers_each_with_its_tags(allowed_by: Callable[..., Allows]) -> None:
    allows = allowed_by([GET, TOOL, CALL], ["<function", "<tool", MARK])
    for text in (
        'a<tool/\n{"a": 1} b <function=get>{"a": 2}</function> c',
        f'x {MARK}call {{"a": 3}}\n y',
        f'{MARK}call {{"a": 3}}\n<tool/\n{{"a": 1}}',
    ):
        assert allows(text), text
    for text in ("<tool=get>", f"{MARK}", f"x {MARK}other", "<function/\n", "<tool/\n{}"):
        assert not allows(text), text


@pytest.mark.parametrize(
    ("ends", "good", "bad"),
    [
        ({"at_least_one": True}, ["{t}", "a {t} b {t}"], ["", "text"]),
        ({"stops_after_first": True}, ["", "text", "a {t}"], ["{t} b", "{t}{t}"]),
        (
            {"at_least_one": True, "stops_after_first": True},
            ["{t}", "a {t}"],
            ["", "text", "{t} b"],
        ),
    ],
)
def test_how_many_tags_there_are(
    allowed_by: Callable[..., Allows], ends: Any, good: list[str], bad: list[str]
) -> None:
    allows = allowed_by([GET], ["<function="], **ends)
    tag = '<function=get>{"a": 1}</function>'
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            assert allows(text.replace("{t}", tag)) is is_good, text


def test_tags_that_cannot_be_followed() -> None:
    literals = Literals({MARK: 7})
    shape = {"at_least_one": False, "stops_after_first": False}
    with pytest.raises(GrammarError, match="tag 1 does not begin with any"):
        structural_grammar([GET, TOOL], ["<function"], literals, **shape)
    inside = StructuralTag(f"a{MARK}b", SCHEMA, "")
    with pytest.raises(GrammarError, match="special token only first"):
        structural_grammar([inside], [f"a{MARK}"], literals, **shape)
