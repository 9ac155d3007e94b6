"""Masks of grammars, on the bundled model's vocabulary; jsonschema and `re` judge the outputs."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jsonschema
import pytest
import torch

from moed.config.engine_config import ModelConfig
from moed.config.model import bundled_checkpoint, load_model_config
from moed.server.grammar_library import compile_grammar, make_vocabulary, to_llguidance
from moed.server.grammar_masks import GrammarMasks, unpack, unpack_words
from moed.server.request import Request
from moed.server.sampler import sample
from moed.server.scheduler import Sampled, Schedule, ScheduledRequest
from moed.server.tokenizer import TextTokenizer
from tests.server.engine.fakes import make_request
from tests.server.http.checkpoints import sentencepiece_tokenizer, token_id, write_checkpoint
from tests.server.http.configs import frontend_config

# generation_config.json names both.
ENDS = (765, 763)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {"flag": {"type": "boolean"}},
            "required": ["flag"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(
        bundled_checkpoint(),
        model="demo",
        revision=None,
        served_model_names=("demo",),
        dtype="auto",
        load_format="auto",
        seed=0,
    )


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> TextTokenizer:
    return TextTokenizer.load(model.path)


def request(kind: str, source: str, output: list[int] | None = None, **params: Any) -> Request:
    grammar = to_llguidance(kind, source, outer="", calls="")
    message = make_request(
        "r",
        [1, 2],
        400,
        output_token_ids=output or [],
        stop_token_ids=list(ENDS),
        grammar=grammar,
        **params,
    )
    return Request.from_message(message, 0, 2000)


def step(masks: GrammarMasks, requests: list[Request], logits: torch.Tensor) -> list[Sampled]:
    """One decode step; what was chosen is appended, as the scheduler does."""
    scheduled = tuple(ScheduledRequest(made, 1, range(0), True) for made in requests)
    schedule = Schedule(scheduled, len(scheduled))
    pending = masks.start(schedule)
    assert pending is not None
    results = sample(schedule, logits, pending.result(20))
    for made, result in zip(requests, results, strict=True):
        if result.error is None:
            assert result.token_id is not None
            made.token_ids.append(result.token_id)
    return results


def generate(masks: GrammarMasks, made: Request, vocab_size: int, seed: int) -> list[int]:
    """A whole output on random logits."""
    generator = torch.Generator().manual_seed(seed)
    while made.finish_reason() is None:
        (result,) = step(masks, [made], torch.randn(1, vocab_size, generator=generator) * 3)
        assert result.error is None, result.error
    return made.token_ids[made.num_prompt_tokens :]


def text_of(tokenizer: TextTokenizer, output: list[int]) -> str:
    assert output[-1] in ENDS
    return tokenizer.decode(output[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_logits_the_output_fits_the_schema(
    model: ModelConfig, tokenizer: TextTokenizer, seed: int
) -> None:
    masks = GrammarMasks(model, 1)
    made = request("json", json.dumps(SCHEMA), temperature=1.0, seed=seed)
    found = json.loads(text_of(tokenizer, generate(masks, made, model.vocab_size, seed)))
    jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", r"[a-c]{2}/\d{1,3}", r"[a-c]{2}/\d{1,3}"),
        ("choice", json.dumps(["yes", "no", 'a "b"\n']), 'yes|no|a "b"\n'),
        ("grammar", 'start: "x" ("1" | "2") ~ 2', "x[12]{2}"),
        ("grammar", 'root ::= "a" | "b" root', "b*a"),
    ],
)
def test_other_kinds(
    model: ModelConfig, tokenizer: TextTokenizer, kind: str, source: str, pattern: str
) -> None:
    masks = GrammarMasks(model, 1)
    for seed in range(5):
        output = generate(masks, request(kind, source), model.vocab_size, seed)
        assert re.fullmatch(pattern, text_of(tokenizer, output)), (seed, output)


def test_a_matcher_rebuilt_from_the_output_goes_on_alike(model: ModelConfig) -> None:
    """As after another rank's failure: only prompt, parameters and output are left."""
    masks = GrammarMasks(model, 1)
    made = request("json", json.dumps(SCHEMA))
    output = generate(masks, made, model.vocab_size, 3)
    logits = torch.randn(1, model.vocab_size, generator=torch.Generator().manual_seed(9))
    for length in range(len(output)):
        fresh = GrammarMasks(model, 1)
        again = request("json", json.dumps(SCHEMA), output[:length])
        schedule = Schedule((ScheduledRequest(again, 1, range(0), True),), 1)
        pending = fresh.start(schedule)
        assert pending is not None
        allowed = unpack(pending.result(20).bits, logits.device)[0]
        assert bool(allowed[output[length]]), length


def test_requests_of_one_step_do_not_meet(model: ModelConfig, tokenizer: TextTokenizer) -> None:
    """Each follows its own grammar, a free one none at all."""
    masks = GrammarMasks(model, 2)
    both = [request("regex", "a+b", seed=1), request("regex", "[0-9]{3}", seed=2)]
    free = Request.from_message(make_request("f", [1], 5), 0, 100)
    logits = torch.zeros(3, model.vocab_size)
    logits[:, 700] = 5.0
    (x, y, z) = step(masks, [*both, free], logits)
    assert tokenizer.token_text(x.token_id or 0) in ("a", "ab", "aa")
    assert tokenizer.token_text(y.token_id or 0).isdigit()
    assert z.token_id == 700


def test_min_tokens_does_not_hold_back_the_end_of_a_complete_grammar(model: ModelConfig) -> None:
    masks = GrammarMasks(model, 1)
    made = request("regex", "ab", min_tokens=6)
    output = generate(masks, made, model.vocab_size, 0)
    assert output[-1] in ENDS and len(output) == 6
    assert set(output[2:]) <= set(ENDS)


def test_ignored_ends_repeat_until_the_limit(model: ModelConfig) -> None:
    masks = GrammarMasks(model, 1)
    grammar = to_llguidance("regex", "ab", outer="", calls="")
    message = make_request("r", [1], 6, grammar=grammar)
    output = generate(masks, Request.from_message(message, 0, 100), model.vocab_size, 0)
    assert len(output) == 6 and output[-1] in ENDS


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(model: ModelConfig) -> None:
    masks = GrammarMasks(model, 1)
    good = request("regex", "a")
    bad = Request.from_message(make_request("r", [1], 5, grammar="start: nowhere"), 0, 100)
    logits = torch.zeros(2, model.vocab_size)
    first, second = step(masks, [bad, good], logits)
    assert first.error is not None and "grammar" in first.error
    assert second.error is None


def test_a_model_without_an_end_token_says_so(model: ModelConfig) -> None:
    masks = GrammarMasks(dataclasses.replace(model, eos_token_ids=()), 1)
    (found,) = step(masks, [request("regex", "a")], torch.zeros(1, model.vocab_size))
    assert found.error is not None and "end token" in found.error


def test_padding_of_the_vocabulary_is_never_chosen(model: ModelConfig) -> None:
    wide = dataclasses.replace(model, vocab_size=1000)
    masks = GrammarMasks(wide, 1)
    logits = torch.zeros(1, 1000)
    logits[0, 768:] = 50.0
    (found,) = step(masks, [request("json", "{}")], logits)
    assert found.token_id is not None and found.token_id < 768


def test_tokens_in_angle_brackets_are_text_unless_special(
    model: ModelConfig, tokenizer: TextTokenizer
) -> None:
    """`<tool_call>` is a token of its own and may be written; `<|im_start|>` may not."""
    masks = GrammarMasks(model, 1)
    logits = torch.zeros(1, model.vocab_size)
    (mark,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    (special,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    logits[0, special], logits[0, mark] = 9.0, 8.0
    for kind, source in (("regex", "(?s:.{1,50})"), ("choice", '["<tool_call>!", "no"]')):
        made = request(kind, source)
        assert step(masks, [made], logits)[0].token_id == mark
        (after,) = step(masks, [made], logits)
        assert after.error is None and after.token_id != special


DOCUMENT = {"a": [1, {"b": None, "c": []}], "d": {}, "e": "x"}


@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_usual_layouts_of_json_are_allowed(
    model: ModelConfig, tokenizer: TextTokenizer, style: dict[str, Any]
) -> None:
    matcher = compile_grammar(make_vocabulary(model), to_llguidance("json", "{}", "", ""))
    tokens = tokenizer.encode(json.dumps(DOCUMENT, **style), add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_no_white_space_without_end(model: ModelConfig, tokenizer: TextTokenizer) -> None:
    matcher = compile_grammar(make_vocabulary(model), to_llguidance("json", "{}", "", ""))
    tokens = tokenizer.encode("[" + "\n" * 100, add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) < 4


def test_bits_are_read_alike_on_any_device() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 5), generator=generator, dtype=torch.int64)
    words = bits.to(torch.int32)
    words[0, 0], words[0, 1] = 1, -(2**31)
    found = unpack_words(words)
    assert found[0, :64].nonzero()[:, 0].tolist() == [0, 63]
    assert torch.equal(found, unpack(words, torch.device("cpu")))


def test_a_vocabulary_of_sentencepiece_kind(tmp_path: pathlib.Path) -> None:
    """`▁` is a space there, and bytes have tokens of their own."""
    tokenizer = sentencepiece_tokenizer()
    folder = write_checkpoint(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size()
    spaced = frontend_config(folder, vocab_size=size + 7, eos_token_ids=(2,)).model
    masks, text = GrammarMasks(spaced, 1), TextTokenizer.load(spaced.path)
    wanted = r"( hello|\n\té){2,4} world"
    grammar = to_llguidance("regex", wanted, outer="", calls="")
    for seed in range(6):
        prompt = [1, token_id(tokenizer, "a")]
        message = make_request("r", prompt, 60, grammar=grammar, stop_token_ids=[2])
        output = generate(masks, Request.from_message(message, 0, 200), size + 7, seed)
        decoder = text.detokenizer(prompt, skip_special_tokens=True)
        written = "".join(map(decoder.add, output[:-1])) + decoder.flush()
        assert re.fullmatch(wanted, written), written
