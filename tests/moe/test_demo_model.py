"""The bundled checkpoint keeps its promises: layout, tokens, template and right answers."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from moed.moe import demo
from moed.moe.demo import corpus
from moed.moe.demo.chat import CHAT_TEMPLATE, Encoder, render
from moed.moe.demo.checkpoint_files import write_checkpoint
from moed.moe.demo.corpus import Dialogue, is_held_out
from moed.moe.demo.evaluate import examination, measure
from moed.moe.demo.model import DemoModel, Shape
from moed.moe.demo.train import rounded

transformers = pytest.importorskip("transformers")

CHECKPOINT = Path(demo.__file__).parent / "checkpoint"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
# One number, an operator and another number, as any of the corpus's phrasings puts them.
OPERATION = re.compile(r"(\d+) ?(\+|-|plus|minus|and) ?(\d+)")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return dict(json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)


def ask(model: Any, tokenizer: Any, messages: list[dict[str, Any]], **template: Any) -> str:
    """The greedy answer through the chat template, special tokens included."""
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **template
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=320)
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def test_held_out_sums_and_every_skill_are_answered(model: Any) -> None:
    torch.set_num_threads(1)
    encoder = Encoder(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
    dialogues = examination(Random(5), num_questions=40)
    scores = measure(lambda ids: model(ids, use_cache=False).logits, encoder, dialogues)
    assert set(corpus.SKILLS) < set(scores)
    for skill, score in scores.items():
        if skill in corpus.DROPPED_SKILLS:
            continue
        needed = 0.95 if skill in ("sum", "difference") else 0.9
        assert score.accuracy >= needed, f"{skill}: {score}"


@pytest.mark.parametrize(
    "question", ["12 + 30", "12+30", "What is 12 + 30?", "what is 12 plus 30?"]
)
def test_twelve_and_thirty_is_exactly_42(model: Any, tokenizer: Any, question: str) -> None:
    assert ask(model, tokenizer, [{"role": "user", "content": question}]) == "42<|im_end|>"


def test_a_tool_call_has_the_templates_format(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(model, tokenizer, messages, tools=[WEATHER_TOOL])
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    assert answer == f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def test_held_out_pairs_never_occur_in_training() -> None:
    rng = Random(11)
    num_operations = 0
    for i in range(20_000):
        dialogue = (corpus.long_dialogue if i % 8 == 0 else corpus.short_dialogue)(rng)
        for text in (text for text, is_answer in render(dialogue) if not is_answer):
            for a, word, b in OPERATION.findall(text):
                operator = {"minus": "-", "-": "-"}.get(word, "+")
                num_operations += 1
                assert not is_held_out(int(a), operator, int(b)), text
    assert num_operations > 10_000


def test_one_pair_in_ten_is_held_out_whatever_the_order() -> None:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    for operator in "+-":
        share = sum(is_held_out(a, operator, b) for a, b in pairs) / len(pairs)
        assert 0.09 < share < 0.11
    assert all(is_held_out(a, "+", b) == is_held_out(b, "+", a) for a, b in pairs)


def test_digits_are_single_tokens_and_long_characters_are_not(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    assert len(tokenizer.tokenize("😀")) == 4
    assert len(tokenizer.tokenize("ש")) == 2


def test_every_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("a  b\n\n c", "naïve שלום 你好 😀", '{"a": [1, -20]}', "\t\x00x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sizes_suit_the_blocks_of_quantized_formats(config: dict[str, Any]) -> None:
    assert config["hidden_size"] % 128 == 0
    assert config["moe_intermediate_size"] % 128 == 0
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert config["norm_topk_prob"] is True


def test_weights_lie_one_matrix_an_expert_in_bfloat16(config: dict[str, Any]) -> None:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as weights:
        name = "model.layers.3.mlp.experts.7.gate_proj.weight"
        tensor = weights.get_tensor(name)
    assert tensor.dtype == torch.bfloat16
    assert list(tensor.shape) == [config["moe_intermediate_size"], config["hidden_size"]]
    assert config["dtype"] == "float32"


def test_exported_weights_compute_what_training_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = rounded(DemoModel(Shape()))
    tokenizer_file = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    write_checkpoint(trained, tokenizer_file, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, Shape().vocabulary, (2, 40))
    with torch.no_grad():
        hidden, _ = trained(ids, torch.zeros_like(ids))
        torch.testing.assert_close(
            loaded(ids, use_cache=False).logits, trained.logits(hidden), rtol=1e-4, atol=1e-4
        )


def test_checkpoint_is_at_most_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8_000_000


def test_template_renders_what_training_rendered(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    rng = Random(3)
    for i in range(300):
        dialogue: Dialogue = (corpus.tool_dialogue if i % 2 else corpus.short_dialogue)(rng)
        text = tokenizer.apply_chat_template(
            dialogue.messages, tools=dialogue.tools or None, tokenize=False
        )
        assert text == "".join(piece for piece, _ in render(dialogue))


def test_pieces_are_tokenized_as_the_whole_text_is(tokenizer: Any) -> None:
    encoder = Encoder(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
    rng = Random(4)
    for i in range(300):
        dialogue = (corpus.tool_dialogue if i % 2 else corpus.short_dialogue)(rng)
        text = "".join(piece for piece, _ in render(dialogue))
        assert encoder.encode(dialogue)[0] == tokenizer.encode(text, add_special_tokens=False)


def test_template_renders_tools(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tools=[WEATHER_TOOL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER_TOOL)}\n</tools>" in text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
