"""ERNIE-4.5-MoE."""

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.moe.families.features import DecoderFeatures, Family, FusedNames, Names, common, number
from moed.moe.router import RouterSpec


def _ernie(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    if config.get("use_bias"):
        raise ModelError("use_bias of an ernie4_5_moe model is not served; served is false")
    return DecoderFeatures(
        **common(model, max_length, eps=1e-5, is_interleaved=True, is_tied=True),
        router=RouterSpec(
            model.top_k,
            renormalize=True,
            least_sum=number(config, "moe_norm_min", 1e-12),
            is_float32=True,
        ),
    )


ERNIE = Family(
    _ernie,
    Names(correction="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts."),
    (FusedNames(correction="mlp.gate.moe_statics.e_score_correction_bias"),),
    "softmax router with correction, shared experts, interleaved rotary",
)
