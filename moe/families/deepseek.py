"""DeepSeek-V2, V3 and R1, Kimi-K2, and GLM-4.7-Flash: latent attention (MLA)."""

from typing import Any

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.weight_bytes import latent_attention
from moed.moe.families.features import DecoderFeatures, Family, Names, common, flag, number
from moed.moe.families.glm import corrected_sigmoid
from moed.moe.rotary import rope_parameters, yarn_scale
from moed.moe.router import RouterSpec

GROUP_METHODS = ("greedy", "group_limited_greedy")


def _latent(model: ModelConfig, max_length: int, *, eps: float = 1e-6) -> dict[str, Any]:
    """What all of them share."""
    config = model.hf_config
    latent = latent_attention(model)
    if latent is None:
        raise ModelError(f"a {model.model_type} model needs kv_lora_rank in config.json")
    is_interleaved = flag(config, "rope_interleave", True)
    has_bias = flag(config, "attention_bias")
    return {
        **common(model, max_length, eps=eps, is_interleaved=is_interleaved),
        "latent": latent,
        "attention_scale": latent.query_dim**-0.5 * _yarn_score_scale(model),
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
    }


def _yarn_score_scale(model: ModelConfig) -> float:
    """What scores are multiplied by, besides the scale of the rotary embedding."""
    rope = rope_parameters(model.hf_config)
    weight = rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not weight:
        return 1.0
    if not rope.get("factor"):
        raise ModelError(f"rope_type {rope['rope_type']!r} with mscale_all_dim needs a factor")
    return yarn_scale(float(rope["factor"]), float(weight)) ** 2


def _deepseek_v2(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    method = config.get("topk_method", "greedy")
    if method not in GROUP_METHODS:
        raise ModelError(
            f"topk_method {method!r} of a deepseek_v2 model is not served; served are "
            f"{', '.join(GROUP_METHODS)}"
        )
    if flag(config, "norm_topk_prob"):
        raise ModelError("norm_topk_prob of a deepseek_v2 model is not served; served is false")
    has_groups = method == "group_limited_greedy"
    return DecoderFeatures(
        **_latent(model, max_length),
        router=RouterSpec(
            model.top_k,
            renormalize=False,
            scale=number(config, "routed_scaling_factor", 1.0),
            num_groups=int(config.get("n_group") or 1) if has_groups else 1,
            num_chosen_groups=int(config.get("topk_group") or 1) if has_groups else 1,
            best_of_group=1,
            is_float32=True,
        ),
    )


def _deepseek_v3(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    for name, served in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (found := config.get(name) or served) != served:
            raise ModelError(
                f"{name} {found!r} of a {model.model_type} model is not served; served is "
                f"{served!r}"
            )
    return DecoderFeatures(
        **_latent(model, max_length),
        router=corrected_sigmoid(model, renormalize=True, scale=2.5, groups=(8, 4)),
    )


def _glm4_moe_lite(model: ModelConfig, max_length: int) -> DecoderFeatures:
    return DecoderFeatures(
        **_latent(model, max_length, eps=1e-5),
        router=corrected_sigmoid(model, renormalize=True, scale=1.8),
    )


_NAMES = Names(shared="mlp.shared_experts.")
_CORRECTED = Names(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.")
DEEPSEEK_V2 = Family(
    _deepseek_v2, _NAMES, description="MLA, softmax router by groups, shared experts"
)
DEEPSEEK_V3 = Family(
    _deepseek_v3, _CORRECTED, description="MLA, corrected sigmoid router by groups, shared experts"
)
GLM4_MOE_LITE = Family(
    _glm4_moe_lite, _CORRECTED, description="MLA, corrected sigmoid router, shared expert"
)
