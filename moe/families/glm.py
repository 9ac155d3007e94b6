"""GLM-4.5 to 4.7, dots.llm1 and Solar-Open: DeepSeek-V3's router over common attention."""

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    Names,
    QueryKeyNorm,
    common,
    flag,
    number,
    refuse_sliding,
)
from moed.moe.router import RouterSpec, Scoring

LEAST_SUM = 1e-20


def corrected_sigmoid(
    model: ModelConfig, renormalize: bool, scale: float = 1.0, groups: tuple[int, int] = (1, 1)
) -> RouterSpec:
    """The router of DeepSeek-V3: sigmoid, correction of the choice, groups, scale. What is given is
    taken for missing fields; `groups` are all, and those chosen from.
    """
    config = model.hf_config
    return RouterSpec(
        model.top_k,
        flag(config, "norm_topk_prob", renormalize),
        Scoring.SIGMOID,
        scale=number(config, "routed_scaling_factor", scale),
        num_groups=int(config.get("n_group", groups[0]) or 1),
        num_chosen_groups=int(config.get("topk_group", groups[1]) or 1),
        least_sum=LEAST_SUM,
        is_float32=True,
    )


def _solar_open(model: ModelConfig, max_length: int) -> DecoderFeatures:
    return DecoderFeatures(
        **common(model, max_length, theta=1e6, eps=1e-5),
        router=corrected_sigmoid(model, renormalize=True),
        attention_bias=flag(model.hf_config, "attention_bias"),
    )


def _glm4_moe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    has_norm = flag(config, "use_qk_norm")
    return DecoderFeatures(
        **common(model, max_length, eps=1e-5, partial=0.5),
        router=corrected_sigmoid(model, renormalize=True),
        query_key_norm=QueryKeyNorm.HEAD if has_norm else QueryKeyNorm.NONE,
        attention_bias=flag(config, "attention_bias", model.model_type == "glm4v_moe_text"),
    )


def _dots1(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    refuse_sliding(config)
    return DecoderFeatures(
        **common(model, max_length),
        router=corrected_sigmoid(model, renormalize=False),
        query_key_norm=QueryKeyNorm.HEAD,
        attention_bias=flag(config, "attention_bias"),
        attention_output_bias=flag(config, "attention_bias"),
    )


_NAMES = Names(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.")
GLM4_MOE = Family(
    _glm4_moe,
    _NAMES,
    description="corrected sigmoid router, shared expert, partial rotary",
)
SOLAR_OPEN = Family(
    _solar_open, _NAMES, description="corrected sigmoid router, shared expert, every layer MoE"
)
DOTS1 = Family(_dots1, _NAMES, description="corrected sigmoid router, shared experts")
