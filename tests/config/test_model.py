"""config.json as transformers writes it, and by hand as older versions wrote it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.model import (
    SERVED_MODEL_TYPES,
    bundled_checkpoint,
    describe_weights,
    load_model_config,
)


def load(path: Path, dtype: str = "auto") -> ModelConfig:
    return load_model_config(
        path,
        model="given",
        revision=None,
        served_model_names=("given",),
        dtype=dtype,
        load_format="auto",
        seed=0,
    )


def test_qwen3_moe_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    # head_dim is one of its free fields.
    free: dict[str, Any] = {"head_dim": 32}
    Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        intermediate_size=777,
        max_position_embeddings=111,
        dtype="bfloat16",
        eos_token_id=7,
        architectures=["Qwen3MoeForCausalLM"],
        **free,
    ).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.model_type == "qwen3_moe"
    assert model.architecture == "Qwen3MoeForCausalLM"
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (300, 96, 2)
    assert (model.num_attention_heads, model.num_kv_heads, model.head_dim) == (6, 3, 32)
    assert (model.num_experts, model.top_k, model.moe_intermediate_size) == (5, 3, 40)
    assert (model.max_position_embeddings, model.dtype) == (111, "bfloat16")
    assert model.eos_token_ids == (7,)
    assert model.hf_config["hidden_size"] == 96


def test_mixtral_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=300,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=80,
        max_position_embeddings=222,
        dtype="float16",
        eos_token_id=2,
        architectures=["MixtralForCausalLM"],
    ).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert (model.model_type, model.architecture) == ("mixtral", "MixtralForCausalLM")
    # 96 / 6: Mixtral's config.json leaves head_dim out.
    assert (model.num_attention_heads, model.num_kv_heads, model.head_dim) == (6, 2, 16)
    assert (model.num_experts, model.top_k, model.moe_intermediate_size) == (4, 2, 80)
    assert (model.max_position_embeddings, model.dtype) == (222, "float16")


@pytest.mark.parametrize(
    ("changes", "asked", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": None}, "auto", "float32"),
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
        ({"torch_dtype": "float64"}, "float32", "float32"),
    ],
)
def test_dtype(write_checkpoint: Any, changes: dict[str, Any], asked: str, dtype: str) -> None:
    assert load(write_checkpoint(**changes), asked).dtype == dtype


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (1, None, (1,)),
        ([1, 2], None, (1, 2)),
        (1, {"eos_token_id": [3, 1]}, (3, 1)),
        (1, {"eos_token_id": 4}, (4,)),
        (1, {"temperature": 0.6}, (1,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_end_of_sequence(
    write_checkpoint: Any, config: Any, generation: Any, ids: tuple[int, ...]
) -> None:
    model = load(write_checkpoint(generation, eos_token_id=config))
    assert model.eos_token_ids == ids
    assert dict(model.generation_config) == (generation or {})


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_expert_count(write_checkpoint: Any, name: str) -> None:
    assert load(write_checkpoint(**{"num_experts": None, name: 6})).num_experts == 6


def test_absent_kv_heads_and_head_dim(write_checkpoint: Any) -> None:
    model = load(write_checkpoint(num_key_value_heads=None))
    assert (model.num_kv_heads, model.head_dim) == (4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            r"model_type is 'llama'; served are deepseek_v2, deepseek_v3, dots1",
        ),
        ({"model_type": None}, r"model_type is None; served are"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"hidden_size": None}, r"config\.json: hidden_size is missing"),
        (
            {"num_experts": None},
            r"num_experts \(or num_local_experts, n_routed_experts, moe_num_experts\) is missing",
        ),
        ({"hidden_size": "128"}, r"hidden_size is '128'"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"vocab_size": True}, r"vocab_size is True"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is not a multiple of .* 3"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok 9 is more than the 8 experts"),
        ({"hidden_size": 130}, r"hidden_size 130 is not a multiple of num_attention_heads 4"),
        ({"torch_dtype": "float8_e4m3fn"}, r"float8_e4m3fn; choose --dtype float32\|bfloat16"),
        ({"eos_token_id": 512}, r"eos_token_id 512 is not in the vocabulary of 512"),
        ({"eos_token_id": "</s>"}, r"eos_token_id '</s>'"),
    ],
)
def test_refusals(write_checkpoint: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_checkpoint(**changes))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match=r"holds a list"):
        load(tmp_path)


def test_weights_are_told_apart_by_the_names_and_sizes_of_their_files(
    write_checkpoint: Any,
) -> None:
    model = load(write_checkpoint())
    shards = [Path(model.path) / f"model-{number}.safetensors" for number in (1, 2)]
    seen = {describe_weights(model)}
    for text in ("abc", "abcd"):
        shards[0].write_text(text)
        seen.add(describe_weights(model))
    shards[0].rename(shards[1])
    seen.add(describe_weights(model))
    assert len(seen) == 4
    assert describe_weights(model) == describe_weights(model)
    assert describe_weights(replace(model, load_format="dummy")) == "dummy"


def test_the_bundled_model_is_found_and_served() -> None:
    model = load(bundled_checkpoint())
    assert model.model_type in SERVED_MODEL_TYPES
    assert (model.num_experts, model.top_k) == (8, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", float("nan")), ("top_p", 2), ("top_k", True)],
)
def test_wrong_sampling_defaults_are_named(write_checkpoint: Any, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"generation_config.json: {name} is .*must be a number"):
        load(write_checkpoint({name: value}))
