"""gpt-oss."""

from moed.config.engine_config import ModelConfig
from moed.config.windows import window_layers
from moed.moe.experts import Activation
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


def _gpt_oss(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    windows = window_layers(model)
    assert windows is not None
    return DecoderFeatures(
        **common(model, max_length, theta=150_000.0, eps=1e-5),
        router=RouterSpec(model.top_k, renormalize=True),
        attention_bias=flag(config, "attention_bias", True),
        attention_output_bias=flag(config, "attention_bias", True),
        window=windows.window,
        window_layers=windows.has_window,
        has_sinks=True,
        activation=Activation(
            limit=number(config, "swiglu_limit", 7.0),
            steepness=number(config, "swiglu_alpha", 1.702),
        ),
    )


GPT_OSS = Family(
    _gpt_oss,
    Names(router="mlp.router.weight", router_bias="mlp.router.bias"),
    (
        FusedNames(
            router="mlp.router.weight",
            gate_up_bias="mlp.experts.gate_up_proj_bias",
            down_bias="mlp.experts.down_proj_bias",
            is_interleaved=True,
            is_transposed=True,
        ),
    ),
    "attention sinks, every other layer slides, clamped SwiGLU, biases",
)
