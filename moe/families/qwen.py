"""Qwen2-MoE (with a gated shared expert) and Qwen3-MoE (norms of queries and keys)."""

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    QueryKeyNorm,
    common,
    flag,
    refuse_sliding,
    sliding,
)
from moed.moe.router import RouterSpec


def _qwen2_moe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    refuse_sliding(config)
    return DecoderFeatures(
        **common(model, max_length),
        router=RouterSpec(model.top_k, flag(config, "norm_topk_prob")),
        attention_bias=flag(config, "qkv_bias", True),
    )


def _qwen3_moe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    return DecoderFeatures(
        **common(model, max_length),
        router=RouterSpec(model.top_k, flag(config, "norm_topk_prob")),
        query_key_norm=QueryKeyNorm.HEAD,
        attention_bias=flag(config, "attention_bias"),
        attention_output_bias=flag(config, "attention_bias"),
        window=sliding(config) if config.get("use_sliding_window") else None,
    )


def _qwen3_vl_moe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    has_bias = flag(model.hf_config, "attention_bias")
    return DecoderFeatures(
        **common(model, max_length, theta=5e5, is_tied=True),
        router=RouterSpec(model.top_k, renormalize=True),
        query_key_norm=QueryKeyNorm.HEAD,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
    )


QWEN2_MOE = Family(
    _qwen2_moe,
    Names(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight"),
    description="gated shared expert",
)
QWEN3_MOE = Family(_qwen3_moe, description="norms of queries and keys")
QWEN3_VL_MOE = Family(
    _qwen3_vl_moe,
    fused=(FusedNames(is_transposed=True), FusedNames()),
    description="text part of Qwen3-VL: norms of queries and keys",
)
