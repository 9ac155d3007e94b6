"""OLMoE."""

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import DecoderFeatures, Family, QueryKeyNorm, common, flag
from moed.moe.router import RouterSpec


def _olmoe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    limit = config.get("clip_qkv")
    return DecoderFeatures(
        **common(model, max_length, eps=1e-5),
        router=RouterSpec(model.top_k, flag(config, "norm_topk_prob")),
        query_key_norm=QueryKeyNorm.WHOLE,
        attention_bias=flag(config, "attention_bias"),
        attention_output_bias=flag(config, "attention_bias"),
        attention_limit=None if limit is None else float(limit),
    )


OLMOE = Family(_olmoe, description="norms over all heads, weights not renormalised")
