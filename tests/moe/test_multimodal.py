"""The text part of multimodal checkpoints is served like a text model by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moed.config.errors import ModelError
from moed.config.weight_bytes import weight_bytes
from moed.moe.text_part import text_names
from tests.moe.checkpoints import make_model, prompt, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank

FILE = "model.safetensors"
WHOLES = [("llama4", "llama4_text"), ("mistral3", "mixtral"), ("kimi_k25", "deepseek_v3")]


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Cloned, since the file that they are mapped from is written over.
    save_file({name: t.clone() for name, t in tensors.items()}, folder / FILE, {"format": "pt"})


def make_whole(family: str, whole: str, folder: Path, **changes: Any) -> Any:
    truth = make_model(family, whole=whole, **changes)
    truth.save_pretrained(folder)
    if whole == "kimi_k25":
        # `transformers` writes the vision part's word for layers; published files do not.
        tensors = load_file(folder / FILE)
        wrong, right = "language_model.model.blocks.", "language_model.model.layers."
        rewrite(folder, {name.replace(wrong, right): t for name, t in tensors.items()})
    return truth


def change_config(folder: Path, **changes: Any) -> None:
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | changes))


@pytest.mark.parametrize(("whole", "family"), WHOLES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_text_part_equals_transformers(
    tmp_path: Path, whole: str, family: str, is_tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    truth = make_whole(family, whole, tmp_path, tie_word_embeddings=is_tied)
    config = engine_config(tmp_path)
    assert (config.model.model_type, config.model.whole_model_type) == (family, whole)
    caplog.set_level("INFO")
    decoder = load(config, one_rank())
    assert f"{whole} is served as text: " in caplog.text and "are not used" in caplog.text
    if whole == "llama4":
        # Whole it cannot be called without an image, as it asks for the image's states then.
        truth = truth.language_model
    tokens = prompt(60, seed=1)
    found = Stepper(config, decoder).step({"a": tokens})["a"]
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=1e-4)


def test_the_plan_counts_the_text_part_alone(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "text").mkdir()
    make_whole("llama4_text", "llama4", tmp_path / "whole")
    make_model("llama4_text").save_pretrained(tmp_path / "text")
    whole, text = (weight_bytes(engine_config(tmp_path / name)) for name in ("whole", "text"))
    assert whole == text


def test_a_tensor_too_many_in_the_text_part_is_refused(tmp_path: Path) -> None:
    make_whole("llama4_text", "llama4", tmp_path)
    extra = {"language_model.model.layers.0.extra": torch.zeros(2)}
    rewrite(tmp_path, {**load_file(tmp_path / FILE), **extra})
    with pytest.raises(ModelError, match="not used.*layers.0.extra"):
        load(engine_config(tmp_path), one_rank())


def test_what_holds_for_the_whole_wins(tmp_path: Path) -> None:
    make_whole("llama4_text", "llama4", tmp_path)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change_config(tmp_path, quantization_config=quantization, tie_word_embeddings=True)
    fields = engine_config(tmp_path).model.hf_config
    assert fields["quantization_config"] == quantization and fields["tie_word_embeddings"] is True
    assert engine_config(tmp_path).model.architecture == "Llama4ForConditionalGeneration"


def test_a_text_part_that_is_not_served_is_named(tmp_path: Path) -> None:
    make_whole("mixtral", "mistral3", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, text_config=written["text_config"] | {"model_type": "mistral"})
    with pytest.raises(ModelError, match="of the text part of 'mistral3' is 'mistral'"):
        engine_config(tmp_path)


def test_names_of_the_text_part() -> None:
    stored = ["vision.a", "model.language_model.embed_tokens.weight", "lm_head.weight"]
    assert text_names(stored) == {
        "model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
    }
    with pytest.raises(ModelError, match="text part of this multimodal checkpoint is not found"):
        text_names(["vision.a", "model.norm.weight"])


def test_qwen3_vl_as_it_is_published(tmp_path: Path) -> None:
    """Experts' matrices lie the other way round than `transformers` 5 writes them."""
    truth = make_model("qwen3_vl_moe_text")
    truth.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    turned = {
        name: tensor.transpose(1, 2).contiguous()
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    assert len(turned) == 6
    rewrite(tmp_path, tensors | turned)
    config, tokens = engine_config(tmp_path), prompt(30, seed=2)
    found = Stepper(config, load(config, one_rank())).step({"a": tokens})["a"]
    torch.testing.assert_close(found, true_logits(truth, tokens), rtol=0, atol=1e-4)
