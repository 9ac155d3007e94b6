"""Every family against `transformers`: long prompts, pieces, both layouts of experts, bytes."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moed.config.attention import WITH_SINKS
from moed.config.errors import ModelError
from moed.config.model import SERVED_MODEL_TYPES
from moed.config.weight_bytes import latent_attention, moe_layers, weight_bytes
from moed.moe.dequantize import dequantize_mxfp4
from moed.moe.families import FAMILIES
from tests.moe.checkpoints import make_checkpoint, make_model, prompt, true_greedy, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank
from tests.moe.quantized import to_mxfp4

TOLERANCE = 1e-4
PIECE = 64
NUM_GREEDY = 24

Made = tuple[Any, pathlib.Path]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Truth, and its checkpoint as people publish it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(request.param, folder), folder


def stepper_of(folder: pathlib.Path) -> Stepper:
    config = engine_config(folder)
    return Stepper(config, load(config, one_rank()))


def in_pieces(stepper: Stepper, tokens: list[int], size: int) -> torch.Tensor:
    starts = range(0, len(tokens), size)
    return torch.cat([stepper.step({"a": tokens[s : s + size]})["a"] for s in starts])


def test_what_is_served_has_a_declaration() -> None:
    assert sorted(FAMILIES) == sorted(SERVED_MODEL_TYPES)


def test_a_long_prompt_whole_and_in_pieces(made: Made) -> None:
    truth, folder = made
    tokens = prompt(200, seed=3)
    expected = true_logits(truth, tokens)
    for size in (len(tokens), PIECE):
        found = in_pieces(stepper_of(folder), tokens, size)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_what_is_known_of_attention_without_a_family(made: Made) -> None:
    """From which the choice of FlashInfer follows."""
    model = engine_config(made[1]).model
    features = FAMILIES[model.model_type].features(model, 64)
    assert features.has_sinks == (model.model_type in WITH_SINKS)
    assert features.latent == latent_attention(model)


def test_greedy_tokens(made: Made) -> None:
    truth, folder = made
    stepper, tokens = stepper_of(folder), prompt(20, seed=4)
    logits, found = stepper.step({"a": tokens})["a"], []
    for _ in range(NUM_GREEDY):
        found.append(int(logits[-1].argmax()))
        logits = stepper.step({"a": found[-1:]})["a"]
    assert found == true_greedy(truth, tokens, NUM_GREEDY)


def test_fused_experts(made: Made, tmp_path: pathlib.Path) -> None:
    """Under the names that `transformers` itself computes with."""
    truth, _ = made
    truth.save_pretrained(tmp_path, save_original_format=False)
    tokens = prompt(40, seed=5)
    found = stepper_of(tmp_path).step({"a": tokens})["a"]
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if family.names.correction]
)
def test_corrections_change_choices(family: str) -> None:
    """Or the tests above would not show their loss."""
    model, tokens = make_model(family), prompt(40, seed=6)
    before = true_logits(model, tokens)
    corrections = [*model.named_buffers(), *model.named_parameters()]
    with torch.no_grad():
        for name, correction in corrections:
            if name.endswith("correction_bias"):
                correction.zero_()
    assert (before - true_logits(model, tokens)).abs().max() > 100 * TOLERANCE


def tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All weights that `thing` leads to, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        if thing.is_floating_point():
            yield thing
        return
    if isinstance(thing, dict):
        thing = list(thing.values())
    parts = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()
    if type(thing).__module__.startswith("moed.moe") or isinstance(thing, list | tuple):
        for part in list(parts):
            yield from tensors_in(part, seen)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_plan_counts_every_weight(
    made: Made, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed layout would hide the bytes."""
    monkeypatch.setattr("moed.moe.linear.can_pack", lambda weight: False)
    monkeypatch.setattr("moed.moe.native.library", lambda: None)
    _, folder = made
    config = engine_config(folder, dtype=dtype)
    decoder = load(config, one_rank())
    held = {(t.data_ptr(), t.numel()): t.nbytes for t in tensors_in(decoder, set())}
    assert sum(held.values()) == sum(weight_bytes(config).values())


def test_the_layers_that_have_experts(made: Made) -> None:
    _, folder = made
    config = engine_config(folder)
    expected = [index for index, is_moe in enumerate(moe_layers(config.model)) if is_moe]
    assert list(load(config, one_rank()).moe_layers) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4_moe", {"num_experts": 6, "n_group": 3, "attention_bias": False}),
        ("glm4_moe", {"use_qk_norm": False, "n_group": 1, "topk_group": 1}),
        ("olmoe", {"num_experts": 6, "clip_qkv": None, "norm_topk_prob": True}),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 1}),
        ("hunyuan_v1_moe", {"attention_bias": True, "tie_word_embeddings": True}),
        (
            "hunyuan_v1_moe",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 1.0,
                    "alpha": 100.0,
                }
            },
        ),
        ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
        ("minimax_m2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
        (
            "phimoe",
            {
                "attention_bias": False,
                "lm_head_bias": False,
                "sliding_window": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        ("llama4_text", {"use_qk_norm": False, "attention_bias": True}),
        ("llama4_text", {"attn_temperature_tuning": False, "attention_chunk_size": None}),
        ("llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 2}),
        ("llama4_text", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
        (
            "qwen3_moe",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
    ],
    ids=str,
)
def test_other_shapes_of_a_family(
    tmp_path: pathlib.Path, family: str, changes: dict[str, Any]
) -> None:
    truth = make_model(family, **changes)
    truth.save_pretrained(tmp_path)
    tokens = prompt(50, seed=7)
    found = in_pieces(stepper_of(tmp_path), tokens, 17)
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)


def test_llama4_where_config_says_least(tmp_path: pathlib.Path) -> None:
    """What is left out follows from the rest, or has the value that `transformers` takes."""
    changes: dict[str, Any] = {"moe_layers": None, "no_rope_layers": None}
    truth = make_model(
        "llama4_text", **changes, no_rope_layer_interval=3, interleave_moe_layer_step=2
    )
    truth.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name in ("moe_layers", "no_rope_layers", "layer_types", "use_qk_norm"):
        del written[name]
    written |= {"no_rope_layer_interval": 3, "interleave_moe_layer_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    tokens = prompt(50, seed=7)
    found = in_pieces(stepper_of(tmp_path), tokens, 17)
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["phimoe", "llama4_text"])
def test_another_number_of_choices_is_refused(tmp_path: pathlib.Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"num_experts_per_tok": 3}))
    with pytest.raises(ModelError, match=f"num_experts_per_tok 3 of a {family} model"):
        stepper_of(tmp_path)


def test_layers_that_draft_tokens_are_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    truth = make_checkpoint("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    drafting = f"model.layers.{truth.config.num_hidden_layers}."
    weights |= {f"{drafting}eh_proj.weight": torch.zeros(4, 4), f"{drafting}x": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"not used by the model.*{drafting}"):
        stepper_of(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(written))
    caplog.set_level("INFO")
    tokens = prompt(20, seed=8)
    found = stepper_of(tmp_path).step({"a": tokens})["a"]
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)
    assert f"2 tensors below {drafting} are not used" in caplog.text


def test_other_models_are_refused_with_what_they_need(tmp_path: pathlib.Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for model_type, part in (("qwen3_next", ", which needs linear attention.*"), ("bert", "")):
        written["model_type"] = model_type
        (tmp_path / "config.json").write_text(json.dumps(written))
        with pytest.raises(ModelError, match=f"'{model_type}'{part}; served are deepseek_v2, deep"):
            engine_config(tmp_path)


def test_the_table_of_families() -> None:
    command = [sys.executable, "-m", "moed.server", "models"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(name in shown and family.description in shown for name, family in FAMILIES.items())
    assert "mxfp4" in shown and "longrope" in shown


def test_gpt_oss_as_it_is_published(tmp_path: pathlib.Path) -> None:
    """Experts in MXFP4, whose matrices lie the other way round than plain ones."""
    truth = make_checkpoint("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.clone()
            continue
        parts = [to_mxfp4(matrix.T) for matrix in tensor]
        whole = {suffix: torch.stack([part[suffix] for part in parts]) for suffix in parts[0]}
        stored |= {name + suffix: part for suffix, part in whole.items()}
        rounded = dequantize_mxfp4(*whole.values()).transpose(1, 2)
        assert (rounded - tensor).abs().max() > 1e-3
        with torch.no_grad():
            truth.get_parameter(name).copy_(rounded)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    tokens = prompt(40, seed=9)
    found = in_pieces(stepper_of(tmp_path), tokens, 17)
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=TOLERANCE)
