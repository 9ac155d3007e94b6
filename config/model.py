"""config.json, as transformers 4 and 5 write it, read into one frozen `ModelConfig`."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.missing_parts import MISSING_PARTS
from moed.config.nested import text_part
from moed.config.quantization import quantization_of

SERVED_MODEL_TYPES = (
    *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"),
    *("gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "kimi_k2"),
    *("llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
    *("glm4v_moe_text", "qwen3_vl_moe_text", "solar_open"),
)
# Of each expert, where config.json has other fields for it too.
EXPERT_SIZE_FIELDS = {"hunyuan_v1_moe": ("intermediate_size",)}
DTYPES = ("float32", "bfloat16", "float16")

BUNDLED_NAME = "moed-demo"
BUNDLED_PACKAGE = "moed.moe.demo"
BUNDLED_FOLDER = "checkpoint"
# What a checkpoint may say of the sampling of requests that say nothing, and its bounds.
SAMPLING_DEFAULTS = MappingProxyType(
    {
        "temperature": (0, 100),
        "top_p": (0.0001, 1),
        "top_k": (-1, 2**31 - 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
    }
)


def bundled_checkpoint() -> Path:
    """The directory of the bundled model, found without importing its package's code."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the bundled model's package {BUNDLED_PACKAGE} is not installed: give a MODEL"
        )
    path = Path(spec.submodule_search_locations[0]) / BUNDLED_FOLDER
    if not path.is_dir():
        raise ModelError(f"the bundled model is missing ({path}): reinstall moed, or give a MODEL")
    return path


def load_model_config(
    path: Path,
    *,
    model: str,
    revision: str | None,
    served_model_names: tuple[str, ...],
    dtype: str,
    load_format: str,
    seed: int,
    served_only: bool = True,
) -> ModelConfig:
    """Sizes and names of the checkpoint in `path`; no weights are read.

    `dtype` "auto" takes the checkpoint's; `served_only` False takes a config.json by itself, and of
    any family. Raises `ModelError` for a missing or broken config.json, a family that is not
    served, sizes that contradict each other, or a number format that is not served.
    """
    source = path / "config.json"
    if not served_only and path.is_file():
        path, source = path.parent, path
    raw = _read_json(source)
    if raw is None:
        raise ModelError(
            f"{path} holds no config.json: MODEL is a directory as transformers' save_pretrained "
            "writes it, or org/name on the Hugging Face Hub"
        )
    generation = _read_json(path / "generation_config.json") or {}
    _check_sampling_defaults(generation, path / "generation_config.json")
    whole, raw = raw, text_part(raw)
    whole_model_type = None if raw is whole else str(whole.get("model_type"))
    if served_only and (reasons := unserved(raw, source, whole_model_type)):
        raise ModelError("; ".join(reasons))
    fields = Fields(raw, source)
    hidden_size = fields.count("hidden_size")
    num_attention_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", otherwise=num_attention_heads)
    num_experts = fields.count(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    top_k = fields.count("num_experts_per_tok", "moe_k", "moe_topk")
    _check(
        num_attention_heads % num_kv_heads == 0,
        f"{source}: num_attention_heads {num_attention_heads} is not a multiple of "
        f"num_key_value_heads {num_kv_heads}",
    )
    _check(
        top_k <= num_experts,
        f"{source}: num_experts_per_tok {top_k} is more than the {num_experts} experts",
    )
    vocab_size = fields.count("vocab_size")
    architectures = raw.get("architectures") or [""]
    return ModelConfig(
        path=str(path.resolve()),
        model=model,
        revision=revision,
        served_model_names=served_model_names,
        architecture=str(architectures[0]),
        model_type=str(raw.get("model_type")),
        dtype=_dtype(raw, dtype, source),
        load_format=load_format,
        seed=seed,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_attention_heads),
        vocab_size=vocab_size,
        num_experts=num_experts,
        top_k=top_k,
        moe_intermediate_size=fields.count(
            *EXPERT_SIZE_FIELDS.get(
                str(raw.get("model_type")), ("moe_intermediate_size", "intermediate_size")
            )
        ),
        max_position_embeddings=fields.count("max_position_embeddings"),
        hf_config=raw,
        generation_config=generation,
        eos_token_ids=_eos_token_ids(raw, generation, vocab_size, source),
        whole_model_type=whole_model_type,
    )


class Fields:
    """Reads counts from config.json under any of their names."""

    def __init__(self, raw: Mapping[str, Any], source: Path) -> None:
        self._raw = raw
        self._source = source

    def count(self, *names: str, otherwise: int | None = None) -> int:
        """A number of at least 1. Raises `ModelError` naming the file and the field."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(
                    f"{self._source}: {name} is {value!r}; it must be a whole number of at least 1"
                )
            return value
        if otherwise is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ModelError(f"{self._source}: {names[0]}{others} is missing")
        return otherwise


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ModelError(message)


def unserved(
    raw: Mapping[str, Any], source: Path, whole_model_type: str | None = None
) -> list[str]:
    """Why the checkpoint that `raw`, its config.json, describes is not served; empty if it is.
    `raw` may be the text part of a model of another type.
    """
    found = []
    model_type = raw.get("model_type")
    if model_type not in SERVED_MODEL_TYPES:
        served = ", ".join(SERVED_MODEL_TYPES)
        part = MISSING_PARTS.get(str(model_type))
        lacks = "" if part is None else f", which needs {part}"
        of = "" if whole_model_type is None else f" of the text part of {whole_model_type!r}"
        found.append(f"{source}: model_type{of} is {model_type!r}{lacks}; served are {served}")
    try:
        quantization_of(raw)
    except ModelError as error:
        found.append(f"{source}: {error}")
    return found


def _check_sampling_defaults(generation: Mapping[str, Any], source: Path) -> None:
    for name, (minimum, maximum) in SAMPLING_DEFAULTS.items():
        value = generation.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(
            is_number and minimum <= value <= maximum,
            f"{source}: {name} is {value!r}; it must be a number from {minimum} to {maximum}",
        )


def _dtype(raw: Mapping[str, Any], asked: str, source: Path) -> str:
    if asked != "auto":
        return asked
    # transformers 5 writes `dtype`, 4 wrote `torch_dtype`.
    written = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = str(written).removeprefix("torch.")
    _check(
        dtype in DTYPES,
        f"{source}: the checkpoint's dtype is {dtype}; choose --dtype {'|'.join(DTYPES)}",
    )
    return dtype


def _head_dim(fields: Fields, hidden_size: int, num_attention_heads: int) -> int:
    """Of K; with latent attention (MLA) that of its rotated part, as `transformers` has it."""
    if fields.count("kv_lora_rank", otherwise=-1) > 0:
        for name in ("qk_nope_head_dim", "v_head_dim"):
            fields.count(name)
        return fields.count("qk_rope_head_dim")
    head_dim = fields.count("head_dim", otherwise=-1)
    if head_dim > 0:
        return head_dim
    _check(
        hidden_size % num_attention_heads == 0,
        f"hidden_size {hidden_size} is not a multiple of num_attention_heads "
        f"{num_attention_heads}, and config.json gives no head_dim",
    )
    return hidden_size // num_attention_heads


def _eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int, source: Path
) -> tuple[int, ...]:
    """What ends an answer; generation_config.json wins, as chat models extend it there."""
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    listed = ids if isinstance(ids, list) else [ids]
    for token in listed:
        valid = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        _check(valid, f"{source}: eos_token_id {token!r} is not in the vocabulary of {vocab_size}")
    return tuple(listed)


def describe_weights(model: ModelConfig) -> str:
    """What tells one checkpoint's safetensors files from another's: their names and sizes."""
    if model.load_format == "dummy":
        return "dummy"
    files = sorted(Path(model.path).glob("*.safetensors"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    num_bytes = sum(size for _, size in sizes)
    return f"{len(sizes)} files, {num_bytes} bytes, {digest}"
