"""Llama 4, its text part."""

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.windows import rotary_layers, window_layers
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    QueryKeyNorm,
    Temperature,
    common,
    flag,
    number,
)
from moed.moe.router import RouterSpec, Scoring


def _llama4(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    if model.top_k != 1:
        raise ModelError(
            f"num_experts_per_tok {model.top_k} of a {model.model_type} model is not served; "
            "served is 1, since a row travels once and can be scaled once"
        )
    windows = window_layers(model)
    has_bias = flag(config, "attention_bias")
    return DecoderFeatures(
        **common(model, max_length, theta=5e5, eps=1e-5, is_interleaved=True),
        router=RouterSpec(
            model.top_k, renormalize=False, scoring=Scoring.SIGMOID, weighs_input=True
        ),
        query_key_norm=(
            QueryKeyNorm.PLAIN_AFTER_ROTARY
            if flag(config, "use_qk_norm", True)
            else QueryKeyNorm.NONE
        ),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        window=None if windows is None else windows.window,
        window_layers=None if windows is None else windows.has_window,
        rotary_layers=tuple(rotary_layers(model)),
        temperature=(
            Temperature(
                step=int(number(config, "floor_scale", 8192)),
                strength=number(config, "attn_scale", 0.1),
            )
            if flag(config, "attn_temperature_tuning", True)
            else None
        ),
    )


_ROUTER = "feed_forward.router.weight"
LLAMA4 = Family(
    _llama4,
    Names(router=_ROUTER, shared="feed_forward.shared_expert.", dense="feed_forward."),
    (
        FusedNames(
            router=_ROUTER,
            gate_up="feed_forward.experts.gate_up_proj",
            down="feed_forward.experts.down_proj",
            is_transposed=True,
        ),
    ),
    "weights on the experts' input, aligned windows, layers without rotary, shared expert",
)
