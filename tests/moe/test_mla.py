"""Latent attention: its two ways agree, its cache is as large as planned, its variants equal
`transformers`.
"""

import json
import pathlib
from typing import Any

import pytest
import torch

from moed.config.engine_config import EngineConfig
from moed.config.errors import ModelError
from moed.config.kv_layout import kv_layout
from moed.moe import mla
from moed.moe.fused_moe import FusedMoE
from moed.moe.kv_cache import KVCache, LatentCache, make_kv_cache
from moed.moe.mla import LatentAttention
from moed.moe.router import Router
from tests.moe.checkpoints import make_checkpoint, prompt, true_logits
from tests.moe.harness import BLOCK_SIZE, NUM_BLOCKS, Stepper, engine_config, load, one_rank

TOLERANCE = 1e-4
WAYS_TOLERANCE = 4e-5
YARN_WITHOUT_FACTOR = {
    "rope_type": "yarn",
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, EngineConfig]:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    return make_checkpoint("deepseek_v3", folder), engine_config(folder)


def in_pieces(config: EngineConfig, tokens: list[int], size: int) -> torch.Tensor:
    stepper = Stepper(config, load(config, one_rank()))
    starts = range(0, len(tokens), size)
    return torch.cat([stepper.step({"a": tokens[s : s + size]})["a"] for s in starts])


@pytest.mark.parametrize("size", [2, 30, 70])
def test_absorbed_and_expanded_pieces_are_the_same(
    made: tuple[Any, EngineConfig], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    truth, config = made
    tokens, found = prompt(70, seed=1), {}
    for absorbs in (True, False):
        monkeypatch.setattr(LatentAttention, "_absorbs", lambda *_, way=absorbs: way)
        found[absorbs] = in_pieces(config, tokens, size)
        torch.testing.assert_close(
            found[absorbs], true_logits(truth, tokens), rtol=0, atol=TOLERANCE
        )
    # Different arithmetic, as rounding shows.
    assert 0 < (found[True] - found[False]).abs().max() < WAYS_TOLERANCE


def test_short_pieces_are_absorbed_and_long_ones_expanded(
    made: tuple[Any, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = made
    chosen: list[tuple[int, bool]] = []
    choose = LatentAttention._absorbs

    def spy(attention: LatentAttention, num_rows: int, length: int) -> bool:
        chosen.append((num_rows, choose(attention, num_rows, length)))
        return chosen[-1][1]

    monkeypatch.setattr(LatentAttention, "_absorbs", spy)
    for size in (2, 100):
        in_pieces(config, prompt(200, seed=2), size)
    assert {(100, False), (2, True)} <= set(chosen)


@pytest.mark.parametrize("num_bytes", [1, 21_000])
def test_heads_expanded_in_groups(
    made: tuple[Any, EngineConfig], monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """One by one; and three of the four, then the last."""
    _, config = made
    tokens = prompt(38, seed=3)
    expected = in_pieces(config, tokens, 38)
    groups: list[int] = []
    attend = mla._attend

    def spy(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        groups.append(query.shape[1])
        return attend(query, *rest)

    monkeypatch.setattr(mla, "_attend", spy)
    monkeypatch.setattr(mla, "LATENT_EXPANDED_BYTES", num_bytes)
    found = in_pieces(config, tokens, 38)
    assert set(groups) == ({1} if num_bytes == 1 else {3, 1})
    torch.testing.assert_close(found, expected, rtol=0, atol=WAYS_TOLERANCE)


def test_the_cache_holds_one_row_a_token(made: tuple[Any, EngineConfig]) -> None:
    """Of 32 + 8 numbers, where K and V of 4 heads would be 4 x (24 + 20)."""
    _, config = made
    dtype, cpu = torch.float32, torch.device("cpu")
    cache = make_kv_cache(config.model, 4, NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, dtype, cpu)
    assert isinstance(cache, LatentCache)
    held = sum(rows.nbytes for rows in cache.rows)
    assert held == kv_layout(config).num_bytes(NUM_BLOCKS)
    assert held == NUM_BLOCKS * BLOCK_SIZE * config.model.num_layers * (32 + 8) * 4


def test_other_attention_has_keys_and_values(tmp_path: pathlib.Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = engine_config(tmp_path)
    cache = make_kv_cache(config.model, 2, 3, 3, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    assert isinstance(cache, KVCache)
    held = sum(part.nbytes for part in (*cache.keys, *cache.values))
    assert held == kv_layout(config).num_bytes(3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "greedy", "n_group": None}),
        ("deepseek_v2", {"num_experts": 6, "n_group": 3, "topk_group": 2, "v_head_dim": 40}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
        ("deepseek_v3", {"num_experts": 6, "n_group": 3, "norm_topk_prob": False}),
        ("deepseek_v3", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("kimi_k2", {"n_shared_experts": 1, "num_attention_heads": 6, "num_key_value_heads": 6}),
    ],
    ids=str,
)
def test_variants_equal_transformers(
    tmp_path: pathlib.Path, family: str, changes: dict[str, Any]
) -> None:
    truth = make_checkpoint(family, tmp_path, **changes)
    tokens = prompt(60, seed=4)
    expected = true_logits(truth, tokens)
    for size in (60, 17):
        found = in_pieces(engine_config(tmp_path), tokens, size)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_yarn_as_transformers_4_wrote_it(tmp_path: pathlib.Path) -> None:
    """As in the configurations of DeepSeek-V3 and Kimi-K2."""
    truth = make_checkpoint("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    rope = written.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    written |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    for name in ("head_dim", "qk_head_dim", "num_local_experts"):
        written.pop(name, None)
    written |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    path.write_text(json.dumps(written))
    tokens = prompt(100, seed=5)
    found = in_pieces(engine_config(tmp_path), tokens, 100)
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' .*greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob of a deepseek_v2 model"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' .*'sigmoid'"),
        ("kimi_k2", {"topk_method": "greedy"}, "topk_method 'greedy' of a kimi_k2 .*'noaux_tc'"),
        ("deepseek_v3", {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim is 0"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        (
            "deepseek_v3",
            {"rope_parameters": YARN_WITHOUT_FACTOR},
            "'yarn' with mscale_all_dim needs a factor",
        ),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: pathlib.Path, family: str, changes: dict[str, Any], words: str
) -> None:
    make_checkpoint(family, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=words):
        load(engine_config(tmp_path), one_rank())


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_experts_of_16_bit_models_are_chosen_in_float32(
    tmp_path: pathlib.Path, family: str
) -> None:
    """Among so many rows 16 bits would choose others for some."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(family, tmp_path)
    truth: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    decoder = load(engine_config(tmp_path, dtype="bfloat16"), one_rank())
    mlp = decoder._layers[1].mlp
    assert isinstance(mlp, FusedMoE)
    router = mlp._router
    hidden = torch.randn(4000, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    with torch.inference_mode():
        _, weights, ids = truth.model.layers[1].mlp.gate(hidden)
    found_weights, found_ids = router.route(hidden)
    chosen = torch.zeros(4000, 8).scatter(1, ids, weights)
    found = torch.zeros(4000, 8).scatter(1, found_ids, found_weights)
    torch.testing.assert_close(found, chosen, rtol=0, atol=1e-5)
    assert router.weight.dtype == torch.float32
    rounded = Router(router.weight.bfloat16(), router.spec, router.correction).route(hidden)[1]
    assert not torch.equal(rounded.sort().values, ids.sort().values)
