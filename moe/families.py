"""Model families as declarations: what config.json means, and what the checkpoint's tensors are
called. The decoder is one and the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError


@dataclass(frozen=True)
class DecoderFeatures:
    """What the decoder needs to know beyond the sizes of `ModelConfig`."""

    rms_norm_eps: float
    rope_theta: float
    has_qk_norm: bool
    attention_bias: bool
    """Of Q, K and V."""
    attention_output_bias: bool
    renormalize: bool
    """The router's K weights are made to sum to 1."""
    weighs_input: bool
    """The router's weights scale the experts' input instead of their output."""
    shared_intermediate_size: int
    """Of the experts that every token passes, together; 0: there are none."""
    moe_layers: tuple[bool, ...]
    """By layer: MoE, or a dense MLP."""
    dense_intermediate_size: int
    tie_word_embeddings: bool
    sliding_window: int | None


@dataclass(frozen=True)
class Names:
    """Where a MoE layer's tensors lie below `model.layers.N.`; `{e}` is a global expert id."""

    router: str
    gate: str
    up: str
    down: str
    shared: str | None = None
    """Prefix of the shared experts' projections."""
    shared_gate: str | None = None


@dataclass(frozen=True)
class FusedNames:
    """The same, where all experts of a layer lie in one tensor: [E, 2I, D] and [E, D, I].

    `save_pretrained(save_original_format=False)` writes them so, under one set of names.
    """

    router: str = "mlp.gate.weight"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"


@dataclass(frozen=True)
class Family:
    """One declaration."""

    names: Names
    features: Callable[[ModelConfig], DecoderFeatures]


def family_of(model: ModelConfig) -> Family:
    """Raises `ModelError` for a model type without a declaration."""
    if model.model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model.model_type!r} are not served; served are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model.model_type]


def _common(model: ModelConfig, rope_theta: float, rms_norm_eps: float) -> dict[str, Any]:
    """What both families share; the numbers are what `transformers` takes for a missing field."""
    config = model.hf_config
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not served; served is 'silu'")
    return {
        "rms_norm_eps": float(config.get("rms_norm_eps", rms_norm_eps)),
        "rope_theta": _rope_theta(config, rope_theta),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dense_intermediate_size": int(config.get("intermediate_size") or 0),
        "weighs_input": False,
        "shared_intermediate_size": 0,
    }


def _rope_theta(config: Mapping[str, Any], otherwise: float) -> float:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"rope_type {kind!r} is not served; served is 'default'")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not served; served is 1.0")
    return float(rope.get("rope_theta") or config.get("rope_theta") or otherwise)


def _moe_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer, `mlp_only_layers` left out."""
    config = model.hf_config
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(model.num_layers)
    )


def _qwen2_moe(model: ModelConfig) -> DecoderFeatures:
    config = model.hf_config
    common = _common(model, rope_theta=1e4, rms_norm_eps=1e-6)
    common["shared_intermediate_size"] = int(config.get("shared_expert_intermediate_size") or 0)
    # Which layers slide depends on their number there; no checkpoint is known that asks for it.
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window of a qwen2_moe model is not served; served is false")
    return DecoderFeatures(
        **common,
        has_qk_norm=False,
        attention_bias=bool(config.get("qkv_bias", True)),
        attention_output_bias=False,
        renormalize=bool(config.get("norm_topk_prob", False)),
        moe_layers=_moe_layers(model),
        sliding_window=None,
    )


def _qwen3_moe(model: ModelConfig) -> DecoderFeatures:
    config = model.hf_config
    return DecoderFeatures(
        **_common(model, rope_theta=1e4, rms_norm_eps=1e-6),
        has_qk_norm=True,
        attention_bias=bool(config.get("attention_bias", False)),
        attention_output_bias=bool(config.get("attention_bias", False)),
        renormalize=bool(config.get("norm_topk_prob", False)),
        moe_layers=_moe_layers(model),
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window") else None,
    )


def _mixtral(model: ModelConfig) -> DecoderFeatures:
    return DecoderFeatures(
        **_common(model, rope_theta=1e6, rms_norm_eps=1e-5),
        has_qk_norm=False,
        attention_bias=False,
        attention_output_bias=False,
        renormalize=True,
        moe_layers=(True,) * model.num_layers,
        sliding_window=model.hf_config.get("sliding_window"),
    )


FAMILIES = {
    "qwen2_moe": Family(
        Names(
            router="mlp.gate.weight",
            gate="mlp.experts.{e}.gate_proj.weight",
            up="mlp.experts.{e}.up_proj.weight",
            down="mlp.experts.{e}.down_proj.weight",
            shared="mlp.shared_expert.",
            shared_gate="mlp.shared_expert_gate.weight",
        ),
        _qwen2_moe,
    ),
    "qwen3_moe": Family(
        Names(
            router="mlp.gate.weight",
            gate="mlp.experts.{e}.gate_proj.weight",
            up="mlp.experts.{e}.up_proj.weight",
            down="mlp.experts.{e}.down_proj.weight",
        ),
        _qwen3_moe,
    ),
    "mixtral": Family(
        Names(
            router="block_sparse_moe.gate.weight",
            gate="block_sparse_moe.experts.{e}.w1.weight",
            up="block_sparse_moe.experts.{e}.w3.weight",
            down="block_sparse_moe.experts.{e}.w2.weight",
        ),
        _mixtral,
    ),
}
