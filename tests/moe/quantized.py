"""Writers of quantised checkpoints, and the same weights plain, as the truth."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moed.moe.dequantize import (
    E2M1_VALUES,
    dequantize_fp8_block,
    dequantize_int4,
    dequantize_mxfp4,
)

FILE = "model.safetensors"
INT4_GROUP_SIZE = 16
Parts = dict[str, torch.Tensor]


def to_fp8_block(weight: torch.Tensor) -> Parts:
    """Each block of 128 x 128 fills the range of e4m3."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows, columns = (-(-size // 128) for size in weight.shape[-2:])
    scales = torch.empty(*weight.shape[:-2], rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = (
                ...,
                slice(row * 128, row * 128 + 128),
                slice(column * 128, column * 128 + 128),
            )
            scale = weight[block].abs().amax(dim=(-2, -1)) / 448
            scales[..., row, column] = scale
            values[block] = (weight[block] / scale[..., None, None]).to(values.dtype)
    return {"": values, "_scale_inv": scales}


def to_mxfp4(weight: torch.Tensor) -> Parts:
    """Nearest e2m1 numbers; the largest of a group is at most 6 times its power of two."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = (groups.abs().amax(dim=-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    distances = (scaled.abs()[..., None] - torch.tensor(E2M1_VALUES)).abs()
    codes = distances.argmin(dim=-1) | (scaled < 0).long() << 3
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {
        "_blocks": blocks.to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }


def to_int4(weight: torch.Tensor) -> Parts:
    """Symmetric, -8 to 7, by groups of a row."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, INT4_GROUP_SIZE)
    scales = groups.abs().amax(dim=-1) / 7
    numbers = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = sum(numbers[:, place::8] << 4 * place for place in range(8))
    assert isinstance(words, torch.Tensor)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"_packed": signed, "_scale": scales, "_shape": torch.tensor([rows, columns])}


WRITERS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "fp8": to_fp8_block,
    "mxfp4": to_mxfp4,
    "int4": to_int4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": INT4_GROUP_SIZE,
                },
            }
        },
    },
}


def to_plain(stored_format: str, parts: Parts, columns: int) -> torch.Tensor:
    if stored_format == "fp8":
        return dequantize_fp8_block(*parts.values())
    if stored_format == "mxfp4":
        return dequantize_mxfp4(*parts.values())
    return dequantize_int4(parts["_packed"], parts["_scale"], columns, INT4_GROUP_SIZE)


def quantize_checkpoint(stored_format: str, plain: pathlib.Path, quantized: pathlib.Path) -> None:
    """Write `plain` again into `quantized`, and round the weights of `plain` to the same numbers.

    Products are quantised, of attention too; the router, the head, norms and the embedding are not.
    """
    tensors = {name: tensor.clone() for name, tensor in load_file(plain / FILE).items()}
    stored: Parts = {}
    for name, tensor in tensors.items():
        if not is_product(name):
            stored[name] = tensor
            continue
        parts = WRITERS[stored_format](tensor)
        tensors[name] = to_plain(stored_format, parts, tensor.shape[-1])
        stored |= {name + suffix: part for suffix, part in parts.items()}
    quantized.mkdir(exist_ok=True)
    save_file(tensors, plain / FILE, metadata={"format": "pt"})
    save_file(stored, quantized / FILE, metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = CONFIGS[stored_format]
    (quantized / "config.json").write_text(json.dumps(config))


def is_product(name: str) -> bool:
    if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
        return False
    return "_proj" in name or ".experts." in name


def products(folder: pathlib.Path) -> Iterator[str]:
    """Names of the products of a plain checkpoint."""
    return (name for name in load_file(folder / FILE) if is_product(name))
