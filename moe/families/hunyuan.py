"""Hunyuan-MoE-V1 (A13B)."""

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    QueryKeyNorm,
    common,
    flag,
)
from moed.moe.router import RouterSpec


def _hunyuan(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    return DecoderFeatures(
        **common(model, max_length, eps=1e-5),
        router=RouterSpec(model.top_k, renormalize=True),
        query_key_norm=QueryKeyNorm.HEAD_AFTER_ROTARY,
        attention_bias=flag(config, "attention_bias"),
        attention_output_bias=flag(config, "attention_bias"),
    )


_ROUTER = "mlp.gate.wg.weight"
HUNYUAN = Family(
    _hunyuan,
    Names(
        router=_ROUTER,
        shared="mlp.shared_mlp.",
        query_norm="self_attn.query_layernorm.weight",
        key_norm="self_attn.key_layernorm.weight",
    ),
    (FusedNames(router=_ROUTER),),
    "shared expert, norms after the rotary embedding",
)
