"""`quantization_config` of config.json: in which numbers a checkpoint's weights are stored.

Served are three formats, as their writers define them:

- FP8 in blocks: `quant_method` "fp8" with `weight_block_size` (DeepSeek-V3, Qwen3 FP8 releases);
- MXFP4: `quant_method` "mxfp4" (gpt-oss), numbers of the OCP Microscaling specification;
- INT4 by groups: `quant_method` "compressed-tensors" with `format` "pack-quantized" (W4A16).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moed.config.errors import ModelError

FP8_BLOCK_SIZE = [128, 128]
MXFP4_GROUP_SIZE = 32
SERVED_FORMATS = (
    "fp8 with weight_block_size [128, 128], mxfp4, and compressed-tensors in format "
    "pack-quantized with symmetric 4-bit integers by groups"
)


class StoredFormat(StrEnum):
    """How quantised weights lie in a checkpoint's files; in memory they are plain."""

    FP8_BLOCK = "fp8"
    MXFP4 = "mxfp4"
    INT4_GROUP = "int4"


@dataclass(frozen=True)
class Quantization:
    """What `quantization_config` says of the weights that are quantised. Which are is seen in the
    files: lists such as `ignore` and `modules_to_not_convert` say the same once more.
    """

    stored_format: StoredFormat
    group_size: int
    """Numbers in a row that share a scale."""


def quantization_of(raw: Mapping[str, Any]) -> Quantization | None:
    """From config.json; None for plain weights. Raises `ModelError` naming what is not served."""
    found = raw.get("quantization_config")
    if found is None or found == {}:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(
            f"the weights are quantised ({method or 'unknown method'}), which is not served; "
            f"served are {SERVED_FORMATS}, and plain weights"
        )
    return reader(found)


def _refuse(holds: bool, method: str, what: str) -> None:
    if not holds:
        raise ModelError(
            f"the weights are quantised ({method}) with {what}, which is not served; served are "
            f"{SERVED_FORMATS}, and plain weights"
        )


def _fp8(found: Mapping[str, Any]) -> Quantization:
    blocks, scheme = found.get("weight_block_size"), found.get("activation_scheme", "dynamic")
    number = found.get("fmt", "e4m3")
    _refuse(blocks == FP8_BLOCK_SIZE, "fp8", f"weight_block_size {blocks}")
    _refuse(scheme == "dynamic", "fp8", f"activation_scheme {scheme!r}")
    _refuse(number in ("e4m3", "float8_e4m3fn"), "fp8", f"fmt {number!r}")
    return Quantization(StoredFormat.FP8_BLOCK, FP8_BLOCK_SIZE[1])


def _mxfp4(found: Mapping[str, Any]) -> Quantization:
    return Quantization(StoredFormat.MXFP4, MXFP4_GROUP_SIZE)


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    method = "compressed-tensors"
    layout, cache = found.get("format"), found.get("kv_cache_scheme")
    groups = found.get("config_groups")
    _refuse(layout == "pack-quantized", method, f"format {layout!r}")
    _refuse(cache is None, method, f"kv_cache_scheme {cache}")
    is_one = isinstance(groups, Mapping) and len(groups) == 1
    _refuse(is_one, method, f"config_groups other than one group: {groups}")
    assert isinstance(groups, Mapping)
    (scheme,) = groups.values()
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    _refuse(isinstance(weights, Mapping), method, f"weights {weights}")
    assert isinstance(weights, Mapping)
    activations = scheme.get("input_activations")
    _refuse(activations is None, method, f"input_activations {activations}")
    return _int4(weights, method)


def _int4(weights: Mapping[str, Any], method: str) -> Quantization:
    wanted: dict[str, tuple[Any, ...]] = {
        "num_bits": (4,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("group",),
        # Other orders keep a group number for each column.
        "actorder": (None, False, "weight", "static"),
    }
    for name, values in wanted.items():
        _refuse(weights.get(name) in values, method, f"{name} {weights.get(name)!r}")
    size = weights.get("group_size")
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    _refuse(is_size, method, f"group_size {size!r}")
    assert isinstance(size, int)
    return Quantization(StoredFormat.INT4_GROUP, size)


_READERS = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors}
