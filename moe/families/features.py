"""The vocabulary of family declarations: what a decoder may do, and what tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.weight_bytes import (
    Latent,
    dense_intermediate_size,
    moe_layers,
    shared_intermediate_size,
)
from moed.config.windows import Window
from moed.moe.experts import SWIGLU, Activation
from moed.moe.rotary import Rotary, make_rotary
from moed.moe.router import RouterSpec


class QueryKeyNorm(Enum):
    """RMS norm of queries and keys."""

    NONE = "none"
    HEAD = "head"
    """Of each head by itself, with weights [d] for all."""
    HEAD_AFTER_ROTARY = "head after rotary"
    PLAIN_AFTER_ROTARY = "plain after rotary"
    """Of each head by itself, without weights, in layers that have a rotary embedding."""
    WHOLE = "whole"
    """Over all heads together, with weights [heads x d]."""

    @property
    def has_weights(self) -> bool:
        return self not in (QueryKeyNorm.NONE, QueryKeyNorm.PLAIN_AFTER_ROTARY)


@dataclass(frozen=True)
class Temperature:
    """Queries of layers without rotary embedding grow with the logarithm of their position."""

    step: int
    """Positions over which they stay the same."""
    strength: float


@dataclass(frozen=True)
class DecoderFeatures:
    """What the decoder needs to know beyond the sizes of `ModelConfig`."""

    rms_norm_eps: float
    rotary: Rotary
    router: RouterSpec
    moe_layers: tuple[bool, ...]
    """By layer: MoE, or a dense MLP."""
    shared_intermediate_size: int
    """Of the experts that every token passes, together; 0: there are none."""
    dense_intermediate_size: int
    tie_word_embeddings: bool
    latent: Latent | None = None
    """Sizes of latent attention (MLA); None: the common kind, with K and V heads."""
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    attention_bias: bool = False
    """Of Q, K and V; with latent attention, of what compresses them."""
    attention_output_bias: bool = False
    window: Window | None = None
    """None: a token sees all before it."""
    window_layers: tuple[bool, ...] | None = None
    """By layer: whether it has the window; None: all have, where there is one."""
    rotary_layers: tuple[bool, ...] | None = None
    """By layer: whether queries and keys are rotated; None: in all."""
    temperature: Temperature | None = None
    has_sinks: bool = False
    """Each head's softmax has one score more, which is learned and weighs nothing."""
    activation: Activation = SWIGLU
    """Of the routed experts."""
    attention_limit: float | None = None
    """Q, K and V are cut off at this size."""
    attention_scale: float | None = None
    """Of the scores; None: one over the root of d."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what each block adds."""
    logits_divisor: float = 1.0
    has_layer_norm: bool = False
    """Norms of hidden states subtract the mean and have a bias."""
    has_head_bias: bool = False
    """Of the logits."""


@dataclass(frozen=True)
class Names:
    """Where a layer's tensors lie below `model.layers.N.`; `{e}` is a global expert id."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{e}.gate_proj.weight"
    up: str = "mlp.experts.{e}.up_proj.weight"
    down: str = "mlp.experts.{e}.down_proj.weight"
    router_bias: str | None = None
    correction: str | None = None
    """Of the router's choice, as many numbers as experts."""
    shared: str | None = None
    """Prefix of the shared experts' projections."""
    dense: str = "mlp."
    """Prefix of the projections of a layer without experts."""
    shared_gate: str | None = None
    shared_gate_up: str | None = None
    """Gate and up in one tensor, [2I, D]; then `shared_down` is the other."""
    shared_down: str | None = None
    query_norm: str = "self_attn.q_norm.weight"
    key_norm: str = "self_attn.k_norm.weight"


@dataclass(frozen=True)
class FusedNames:
    """The same, where all experts of a layer lie in one tensor: [E, 2I, D] and [E, D, I].

    `save_pretrained(save_original_format=False)` writes them so, under one set of names.
    """

    router: str = "mlp.gate.weight"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    correction: str | None = None
    """None: as in `Names`."""
    gate_up_bias: str | None = None
    """[E, 2I]."""
    down_bias: str | None = None
    """[E, D]."""
    is_interleaved: bool = False
    """Rows of gate and up take turns."""
    is_transposed: bool = False
    """[E, D, 2I] and [E, I, D], unless the numbers are quantised."""


@dataclass(frozen=True)
class Family:
    """One declaration."""

    features: Callable[[ModelConfig, int], DecoderFeatures]
    """Of a model whose requests have at most so many tokens."""
    names: Names = Names()
    fused: tuple[FusedNames, ...] = (FusedNames(),)
    """Where else experts may lie, the first that exists."""
    description: str = ""
    """Its peculiarities, in a few words."""


def common(
    model: ModelConfig,
    max_length: int,
    *,
    theta: float = 1e4,
    eps: float = 1e-6,
    partial: float = 1.0,
    is_interleaved: bool = False,
    is_tied: bool = False,
) -> dict[str, Any]:
    """What all families share; the numbers are what `transformers` takes for missing fields."""
    config = model.hf_config
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not served; served is 'silu'")
    return {
        "rms_norm_eps": float(config.get("rms_norm_eps", eps)),
        "rotary": make_rotary(
            config,
            model.head_dim,
            max_length,
            theta=theta,
            partial=partial,
            is_interleaved=is_interleaved,
        ),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", is_tied)),
        "dense_intermediate_size": dense_intermediate_size(model),
        "shared_intermediate_size": shared_intermediate_size(model),
        "moe_layers": tuple(moe_layers(model)),
    }


def flag(config: Mapping[str, Any], name: str, otherwise: bool = False) -> bool:
    value = config.get(name)
    return otherwise if value is None else bool(value)


def number(config: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = config.get(name)
    return otherwise if value is None else float(value)


def sliding(config: Mapping[str, Any]) -> Window | None:
    """Of families all of whose layers slide."""
    size = config.get("sliding_window")
    return None if size is None else Window(int(size))


def refuse_sliding(config: Mapping[str, Any]) -> None:
    """For families whose layers slide by their number, of which no checkpoint is known."""
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window of this model type is not served; served is false")
