"""Granite-MoE, without and with a shared expert."""

from dataclasses import replace

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    common,
    flag,
    number,
)
from moed.moe.router import RouterSpec


def _granite(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    return DecoderFeatures(
        **common(model, max_length),
        router=RouterSpec(model.top_k, renormalize=True),
        attention_bias=flag(config, "attention_bias"),
        attention_output_bias=flag(config, "attention_bias"),
        attention_scale=number(config, "attention_multiplier", 1.0),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logits_divisor=number(config, "logits_scaling", 1.0),
    )


_FUSED = (
    FusedNames(
        router="block_sparse_moe.router.layer.weight",
        gate_up="block_sparse_moe.input_linear.weight",
        down="block_sparse_moe.output_linear.weight",
    ),
    FusedNames(
        router="block_sparse_moe.router.weight",
        gate_up="block_sparse_moe.experts.gate_up_proj",
        down="block_sparse_moe.experts.down_proj",
    ),
)
GRANITE_MOE = Family(_granite, fused=_FUSED, description="multipliers of Granite")
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    names=Names(
        shared="shared_mlp.",
        shared_gate_up="shared_mlp.input_linear.weight",
        shared_down="shared_mlp.output_linear.weight",
    ),
    description="multipliers of Granite, shared expert",
)
