"""A quantised checkpoint gives the logits of the same numbers stored plain."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moed.config.errors import ModelError
from moed.config.expert_placement import ExpertPlacement
from moed.config.quantization import quantization_of
from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import SCALE_BLOCK, BlockScaled
from moed.moe.experts import ExpertWeights, TorchExperts
from moed.moe.loader import Checkpoint
from moed.moe.survey import Survey
from tests.moe.checkpoints import make_checkpoint, make_model, prompt, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank
from tests.moe.quantized import CONFIGS, FILE, quantize_checkpoint
from tests.moe.spy import Spy

FORMATS = ("fp8", "mxfp4", "int4")
# More than one block of 128 x 128 each way, the last not full.
SIZES: dict[str, Any] = {"hidden_size": 160, "num_hidden_layers": 2, "num_experts": 4}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 160, "initializer_range": 0.12},
    "mixtral": {"intermediate_size": 160, "initializer_range": 0.1},
    "deepseek_v3": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 160,
        "intermediate_size": 160,
        "q_lora_rank": 160,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "head_dim": 32,
        "v_head_dim": 48,
        "initializer_range": 0.08,
    },
}
UP = "model.layers.1.mlp.experts.2.up_proj.weight"
# By format: a scale, and the numbers that it belongs to.
SCALES = {"fp8": "_scale_inv", "mxfp4": "_scales", "int4": "_scale"}
NUMBERS = {"fp8": "", "mxfp4": "_blocks", "int4": "_packed"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def write(
    stored_format: str, folder: Path, family: str = "qwen3_moe", **save: Any
) -> tuple[Path, Path]:
    """A plain checkpoint, and the same one quantised."""
    plain, quantized = folder / "plain", folder / "quantized"
    make_model(family, **SIZES, **OF_FAMILY[family]).save_pretrained(plain, **save)
    quantize_checkpoint(stored_format, plain, quantized)
    return plain, quantized


def load_alone(folder: Path, **options: Any) -> Stepper:
    config = engine_config(folder, **options)
    return Stepper(config, load(config, one_rank()))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    edit(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_alone(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    monkeypatch.setattr("moed.moe.loader.safe_open", lambda *a, **k: Spy(safe_open(*a, **k), found))
    yield found


@pytest.mark.parametrize("family", OF_FAMILY)
@pytest.mark.parametrize("stored_format", FORMATS)
def test_logits_equal_those_of_the_numbers_stored_plain(
    tmp_path: Path, stored_format: str, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    plain, quantized = write(stored_format, tmp_path, family)
    truth: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    truth.eval()
    tokens = prompt(20, seed=1)
    logits = load_alone(quantized).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, true_logits(truth, tokens), rtol=0, atol=2e-4)
    # Not because quantising did nothing.
    exact = make_model(family, **SIZES, **OF_FAMILY[family])
    assert (logits - true_logits(exact, tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("stored_format", ["fp8", "mxfp4"])
def test_all_experts_in_one_tensor(tmp_path: Path, stored_format: str, reads: list[str]) -> None:
    plain, quantized = write(stored_format, tmp_path, save_original_format=False)
    tokens = prompt(20, seed=1)
    logits = load_alone(quantized).step({"a": tokens})["a"]
    assert torch.equal(logits, load_alone(plain).step({"a": tokens})["a"])
    reads.clear()
    load(engine_config(quantized, backend="all2allv", ranks=4), one_rank(3, 4))
    assert {name for name in reads if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{name}{suffix}[3]"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
        for suffix in (NUMBERS[stored_format], SCALES[stored_format])
    }


def test_only_own_experts_are_read(tmp_path: Path, reads: list[str]) -> None:
    _, quantized = write("int4", tmp_path)
    load(engine_config(quantized, backend="all2allv", ranks=4), one_rank(1, 4))
    assert {name for name in reads if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.1.{name}_proj.weight{suffix}"
        for layer in range(2)
        for name in ("gate", "up", "down")
        for suffix in ("_packed", "_scale")
    }
    assert len(reads) == len(set(reads))


def test_converted_to_the_dtype_that_is_computed_with(tmp_path: Path) -> None:
    plain, quantized = write("fp8", tmp_path)
    tokens = prompt(9, seed=2)
    found, expected = (
        load_alone(folder, dtype="bfloat16").step({"a": tokens})["a"]
        for folder in (quantized, plain)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stored_format", FORMATS)
def test_a_missing_scale_is_named(tmp_path: Path, stored_format: str) -> None:
    _, quantized = write(stored_format, tmp_path)
    lost = UP + SCALES[stored_format]
    change(quantized, lambda tensors: tensors.pop(lost))
    message = refused(quantized)
    assert f"{UP} is stored as" in message and f"lacks {lost}" in message


@pytest.mark.parametrize("stored_format", FORMATS)
def test_a_scale_of_another_shape_names_both(tmp_path: Path, stored_format: str) -> None:
    _, quantized = write(stored_format, tmp_path)
    name = UP + SCALES[stored_format]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    change(quantized, edit)
    shape = {"fp8": [2, 2], "mxfp4": [160, 5], "int4": [160, 10]}[stored_format]
    message = refused(quantized)
    assert name in message and f"asks for {shape}" in message
    assert str([shape[0] - 1, shape[1]]) in message


@pytest.mark.parametrize("stored_format", FORMATS)
def test_scales_in_another_dtype_are_refused(tmp_path: Path, stored_format: str) -> None:
    _, quantized = write(stored_format, tmp_path)
    name = UP + SCALES[stored_format]
    change(quantized, lambda tensors: tensors.update({name: tensors[name].to(torch.int16)}))
    assert f"{name} in {FILE} has dtype I16" in refused(quantized)


@pytest.mark.parametrize("suffix", ["_zero_point", "_g_idx"])
def test_what_would_change_the_numbers_is_not_ignored(tmp_path: Path, suffix: str) -> None:
    _, quantized = write("int4", tmp_path)
    change(quantized, lambda tensors: tensors.update({UP + suffix: torch.zeros(1)}))
    message = refused(quantized)
    assert "not used" in message and UP + suffix in message


def test_a_weight_stored_twice_is_not_guessed(tmp_path: Path) -> None:
    _, quantized = write("int4", tmp_path)
    change(quantized, lambda tensors: tensors.update({UP: torch.zeros(160, 160)}))
    assert f"not used by the model that config.json describes: {UP}" in refused(quantized)


def test_weights_that_are_plain_stay_so(tmp_path: Path) -> None:
    """Whichever `ignore` names: the files say what lies in them."""
    plain, quantized = write("int4", tmp_path)
    exact = load_file(plain / FILE)[UP]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("_packed", "_scale", "_shape"):
            del tensors[UP + suffix]
        tensors[UP] = exact

    change(quantized, edit)
    tokens = prompt(9, seed=2)
    assert torch.equal(
        load_alone(quantized).step({"a": tokens})["a"], load_alone(plain).step({"a": tokens})["a"]
    )


def test_a_plain_checkpoint_that_claims_to_be_quantised_is_served(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = CONFIGS["fp8"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_alone(tmp_path)


@pytest.mark.parametrize(
    ("stored_format", "label"), [("fp8", "FP8 in blocks of 128 x 128"), ("int4", "INT4 by groups")]
)
def test_the_log_says_once_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored_format: str, label: str
) -> None:
    _, quantized = write(stored_format, tmp_path)
    with caplog.at_level(logging.INFO, "moed.moe"):
        for rank in range(2):
            load(engine_config(quantized, backend="all2allv", ranks=2), one_rank(rank, 2))
    (line,) = [record.getMessage() for record in caplog.records if "quantised" in record.message]
    assert label in line and "converted to float32" in line


def test_bytes_of_files_and_of_memory(tmp_path: Path) -> None:
    """Each rank of two: what all hold, and half of the experts."""
    _, quantized = write("fp8", tmp_path)
    quantization = quantization_of({"quantization_config": CONFIGS["fp8"]})
    survey = Survey(Checkpoint(quantized, torch.bfloat16, torch.device("cpu"), quantization))
    survey.get("model.norm.weight", (160,))
    assert (survey.stored_bytes, survey.loaded_bytes) == (160 * 4, 160 * 2)
    assert survey.summary() is None
    for expert in ExpertPlacement.linear(4, 2).local_expert_ids(1):
        survey.get(f"model.layers.0.mlp.experts.{expert}.up_proj.weight", (160, 160))
    # A byte for each number, and four for each of 2 x 2 scales.
    assert survey.stored_bytes == 160 * 4 + 2 * (160 * 160 + 4 * 4)
    assert survey.loaded_bytes == (160 + 2 * 160 * 160) * 2
    summary = survey.summary()
    assert summary is not None and "50.7 KiB in its files become 100.3 KiB" in summary


class DequantizedLate:
    """Experts that keep what they are given, and compute with it in plain numbers."""

    kept: ClassVar[list[ExpertWeights]] = []

    def __init__(self, activation_format: object, device_type: str, weights: ExpertWeights) -> None:
        self.kept.append(weights)
        self._experts = TorchExperts(
            ExpertWeights.plain(
                torch.cat([dequantized(weights.gate_up, half) for half in (0, 1)], dim=1),
                dequantized(weights.down, None),
            )
            if weights.device.type == "cpu"
            else ExpertWeights.plain(torch.empty(0, 2, 2), torch.empty(0, 2, 1))
        )

    @property
    def rows_per_slot(self) -> torch.Tensor:
        return self._experts.rows_per_slot

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        return self._experts(dispatched, apply_weights)


def dequantized(weights: BlockScaled, half: int | None) -> torch.Tensor:
    """[e, rows, K] float32, of all rows or of one half; each half's scales begin anew."""
    values, scales = weights.values.float(), weights.scales
    if half is not None:
        values, scales = values.chunk(2, dim=1)[half], scales.chunk(2, dim=1)[half]
    rows, columns = values.shape[1:]
    wide = scales.repeat_interleave(SCALE_BLOCK, dim=1).repeat_interleave(SCALE_BLOCK, dim=2)
    return values * wide[:, :rows, :columns]


def test_fp8_stays_fp8_where_it_can_be_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, quantized = write("fp8", tmp_path, "qwen3_moe")
    tokens = prompt(20, seed=1)
    expected = load_alone(quantized).step({"a": tokens})["a"]
    monkeypatch.setattr(DequantizedLate, "kept", [])
    monkeypatch.setattr("moed.moe.model.can_compute", lambda *wanted: True)
    monkeypatch.setattr("moed.moe.model.make_experts", DequantizedLate)
    found = load_alone(quantized).step({"a": tokens})["a"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # A survey and a load of each layer, and never in plain numbers.
    assert DequantizedLate.kept
    assert all(w.gate_up.is_fp8 and w.down.is_fp8 for w in DequantizedLate.kept)
