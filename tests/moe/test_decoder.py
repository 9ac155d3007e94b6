"""The decoder equals `transformers`, whole and in pieces, alone and in company."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moed.moe.families import FAMILIES
from tests.moe.checkpoints import make_checkpoint, prompt, true_greedy, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank

MIXED = ["qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"]
TOLERANCE = 1e-4
ALONE_TOLERANCE = 1e-5

Make = Callable[..., tuple[Any, Callable[[], Stepper]]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Truth, and a function that makes fresh steppers, for a family and its changes."""
    torch.set_num_threads(1)
    known: dict[str, tuple[Any, Callable[[], Stepper]]] = {}

    def made(family: str, **changes: Any) -> tuple[Any, Callable[[], Stepper]]:
        key = f"{family} {changes}"
        if key not in known:
            folder = tmp_path_factory.mktemp("checkpoint")
            truth = make_checkpoint(family, folder, **changes)
            config = engine_config(folder)
            decoder = load(config, one_rank())
            known[key] = truth, lambda: Stepper(config, decoder)
        return known[key]

    return made


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False}),
    ("qwen3_moe", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"attention_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"num_key_value_heads": 4}),
    ("qwen3_moe", {"head_dim": 32, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("qwen3_moe", {"num_experts": 1}),
    ("qwen3_moe", {"num_experts": 3}),
    ("qwen3_moe", {"num_experts": 6}),
    ("mixtral", {"num_experts": 6, "tie_word_embeddings": True}),
    ("mixtral", {"num_key_value_heads": 1}),
    ("mixtral", {"sliding_window": 8}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda value: str(value))
def test_whole_prompt_and_decodes_equal_transformers(
    make: Make, family: str, changes: dict[str, Any]
) -> None:
    truth, fresh = make(family, **changes)
    tokens = prompt(40, seed=1)
    expected = true_logits(truth, tokens)
    stepper = fresh()
    assert_close(stepper.step({"a": tokens[:37]})["a"], expected[:37])
    for position in range(37, 40):
        found = stepper.step({"a": [tokens[position]]})["a"]
        assert_close(found, expected[position : position + 1])


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("piece", [1, 7, 16, 17, 64])
def test_prompt_in_pieces_equals_transformers(make: Make, family: str, piece: int) -> None:
    truth, fresh = make(family)
    tokens = prompt(70, seed=2)
    stepper = fresh()
    found = [
        stepper.step({"a": tokens[start : start + piece]})["a"]
        for start in range(0, len(tokens), piece)
    ]
    assert_close(torch.cat(found), true_logits(truth, tokens))


@pytest.mark.parametrize("piece", [1, 5, 8, 9, 40])
def test_sliding_window_in_pieces(make: Make, piece: int) -> None:
    truth, fresh = make("mixtral", sliding_window=8)
    tokens, other = prompt(40, seed=9), prompt(40, seed=10)
    stepper = fresh()
    pieces = [slice(start, start + piece) for start in range(0, len(tokens), piece)]
    found = [stepper.step({"a": tokens[rows], "b": other[rows]}) for rows in pieces]
    assert_close(torch.cat([step["a"] for step in found]), true_logits(truth, tokens))
    assert_close(torch.cat([step["b"] for step in found]), true_logits(truth, other))


@pytest.mark.parametrize("family", MIXED)
def test_ragged_requests_share_a_batch(make: Make, family: str) -> None:
    truth, fresh = make(family)
    prompts = {str(length): prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 50)}
    found = fresh().step(prompts)
    for name, tokens in prompts.items():
        assert_close(found[name], true_logits(truth, tokens))


@pytest.mark.parametrize("family", MIXED)
def test_decodes_mix_with_prefills(make: Make, family: str) -> None:
    truth, fresh = make(family)
    texts = {name: prompt(60, seed=ord(name)) for name in "abcde"}
    # Tokens of each request in each of the steps: decodes beside whole prompts, pieces, and
    # requests that sit a step out.
    plan: list[dict[str, int]] = [
        {"a": 20, "b": 1},
        {"a": 1, "b": 1, "c": 33},
        {"d": 7, "a": 1, "c": 1},
        {"b": 16, "d": 10, "a": 1, "c": 1, "e": 1},
        {"e": 1, "b": 1, "d": 1, "a": 1, "c": 1},
    ]
    stepper = fresh()
    done = dict.fromkeys(texts, 0)
    for sizes in plan:
        pieces = {name: texts[name][done[name] : done[name] + n] for name, n in sizes.items()}
        found = stepper.step(pieces)
        for name, n in sizes.items():
            expected = true_logits(truth, texts[name][: done[name] + n])
            assert_close(found[name], expected[done[name] :])
            done[name] += n


@pytest.mark.parametrize("family", MIXED)
def test_greedy_tokens_equal_transformers(make: Make, family: str) -> None:
    truth, fresh = make(family)
    prompts = {"a": prompt(9, seed=3), "b": prompt(21, seed=4)}
    expected = {name: true_greedy(truth, tokens, 24) for name, tokens in prompts.items()}
    # A model that says the same thing whatever the prompt would make this test blind.
    assert all(len(set(tokens)) > 6 for tokens in expected.values()), expected
    assert expected["a"] != expected["b"]
    stepper = fresh()
    logits = stepper.step(prompts)
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(24):
        for name in prompts:
            found[name].append(int(logits[name][-1].argmax()))
        logits = stepper.step({name: tokens[-1:] for name, tokens in found.items()})
    assert found == expected


@pytest.mark.parametrize("family", MIXED)
def test_batch_mates_do_not_change_a_request(make: Make, family: str) -> None:
    _, fresh = make(family)
    tokens = prompt(31, seed=5)
    alone, together = fresh(), fresh()
    expected = [alone.step({"a": tokens[:30]})["a"], alone.step({"a": tokens[30:]})["a"]]
    mates = {name: prompt(length, seed=length) for name, length in (("b", 90), ("c", 3), ("d", 1))}
    found = [
        together.step({"b": mates["b"], "a": tokens[:30], "c": mates["c"]})["a"],
        together.step({"b": [5], "c": [6], "a": tokens[30:], "d": mates["d"]})["a"],
    ]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, ALONE_TOLERANCE)


def test_step_without_tokens(make: Make) -> None:
    truth, fresh = make("qwen3_moe")
    stepper = fresh()
    assert stepper.step({}) == {}
    tokens = prompt(5, seed=6)
    assert_close(stepper.step({"a": tokens})["a"], true_logits(truth, tokens))


def test_only_wanted_rows_get_logits(make: Make) -> None:
    """`num_moe_rows` counts (row, expert) pairs: 3 layers x 4 tokens x top-3."""
    truth, fresh = make("qwen3_moe")
    stepper = fresh()
    before = stepper.num_moe_rows
    tokens = prompt(4, seed=8)
    found = stepper.forward({"a": tokens}, wanted=[3], sizes=[4])
    assert_close(found, true_logits(truth, tokens)[3:])
    assert stepper.num_moe_rows - before == 3 * 4 * 3
