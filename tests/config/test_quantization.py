"""What config.json says of quantised weights is understood, or refused by name."""

import copy
from typing import Any

import pytest

from moed.config.errors import ModelError
from moed.config.quantization import Quantization, StoredFormat, quantization_of

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
            },
        }
    },
}


def int4(**changes: Any) -> dict[str, Any]:
    """With changes to the scheme of weights."""
    changed = copy.deepcopy(INT4)
    changed["config_groups"]["group_0"]["weights"] |= changes
    return changed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        (FP8, Quantization(StoredFormat.FP8_BLOCK, 128)),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            Quantization(StoredFormat.FP8_BLOCK, 128),
        ),
        (MXFP4, Quantization(StoredFormat.MXFP4, 32)),
        (INT4, Quantization(StoredFormat.INT4_GROUP, 32)),
        (int4(group_size=128, actorder="static"), Quantization(StoredFormat.INT4_GROUP, 128)),
    ],
)
def test_what_is_served(given: Any, expected: Quantization | None) -> None:
    assert quantization_of({"quantization_config": given}) == expected


def test_absent_is_plain() -> None:
    assert quantization_of({}) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"bits": 4}, "unknown method"),
        ("fp8", "unknown method"),
        ({"quant_method": ["fp8"]}, "fp8"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (INT4 | {"format": "int-quantized"}, "format 'int-quantized'"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (INT4 | {"config_groups": {}}, "config_groups"),
        (INT4 | {"config_groups": None}, "config_groups"),
        (INT4 | {"config_groups": {"group_0": {"weights": None}}}, "weights None"),
        (INT4 | {"config_groups": {"group_0": 3}}, "weights None"),
        (int4(num_bits=8), "num_bits 8"),
        (int4(type="float"), "type 'float'"),
        (int4(symmetric=False), "symmetric False"),
        (int4(strategy="channel"), "strategy 'channel'"),
        (int4(actorder="group"), "actorder 'group'"),
        (int4(group_size=None), "group_size None"),
        (int4(group_size=-1), "group_size -1"),
    ],
)
def test_what_is_not_served_is_named_beside_what_is(given: Any, words: str) -> None:
    with pytest.raises(ModelError, match=f"{words}.*not served; served are fp8") as caught:
        quantization_of({"quantization_config": given})
    assert "\n" not in str(caught.value)


def test_activations_of_few_bits() -> None:
    given = copy.deepcopy(INT4)
    given["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ModelError, match="input_activations"):
        quantization_of({"quantization_config": given})
