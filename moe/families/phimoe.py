"""Phi-3.5-MoE."""

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    common,
    flag,
    number,
    sliding,
)
from moed.moe.router import RouterSpec, Scoring

NUM_CHOICES = 2


def _phimoe(model: ModelConfig, max_length: int) -> DecoderFeatures:
    config = model.hf_config
    if model.top_k != NUM_CHOICES:
        raise ModelError(
            f"num_experts_per_tok {model.top_k} of a phimoe model is not served; its router "
            f"chooses {NUM_CHOICES}"
        )
    has_bias = flag(config, "attention_bias")
    return DecoderFeatures(
        **common(model, max_length, theta=1e6, eps=1e-5),
        router=RouterSpec(
            model.top_k,
            renormalize=False,
            scoring=Scoring.SPARSE_MIXER,
            jitter=number(config, "router_jitter_noise", 0.01),
        ),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        window=sliding(config),
        has_layer_norm=True,
        has_head_bias=flag(config, "lm_head_bias"),
    )


PHIMOE = Family(
    _phimoe,
    Names(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{e}.w1.weight",
        up="block_sparse_moe.experts.{e}.w3.weight",
        down="block_sparse_moe.experts.{e}.w2.weight",
    ),
    (FusedNames(router="mlp.router.weight"),),
    "sparse mixer, LayerNorm, biases of attention and head, longrope",
)
