"""Mixtral, and MiniMax-M2, whose tensors are named alike."""

from dataclasses import replace

from moed.config.engine_config import ModelConfig
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    QueryKeyNorm,
    common,
    sliding,
)
from moed.moe.router import RouterSpec, Scoring


def _mixtral(model: ModelConfig, max_length: int) -> DecoderFeatures:
    return DecoderFeatures(
        **common(model, max_length, theta=1e6, eps=1e-5),
        router=RouterSpec(model.top_k, renormalize=True),
        window=sliding(model.hf_config),
    )


def _minimax_m2(model: ModelConfig, max_length: int) -> DecoderFeatures:
    rotary_dim = model.hf_config.get("rotary_dim")
    return DecoderFeatures(
        **common(
            model,
            max_length,
            theta=5e6,
            partial=rotary_dim / model.head_dim if rotary_dim else 1.0,
        ),
        router=RouterSpec(model.top_k, renormalize=True, scoring=Scoring.SIGMOID),
        query_key_norm=QueryKeyNorm.WHOLE,
    )


_NAMES = Names(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{e}.w1.weight",
    up="block_sparse_moe.experts.{e}.w3.weight",
    down="block_sparse_moe.experts.{e}.w2.weight",
)
MIXTRAL = Family(_mixtral, _NAMES, description="sliding window")
MINIMAX_M2 = Family(
    _minimax_m2,
    replace(_NAMES, correction="block_sparse_moe.e_score_correction_bias"),
    (FusedNames(correction="mlp.e_score_correction_bias"),),
    "sigmoid with correction, partial rotary, norms over all heads",
)
