"""Rotary position embedding, with the scalings that `transformers` defines
(`modeling_rope_utils.py`): default, linear, dynamic, yarn, longrope, llama3.

Frequencies are fixed once for a launch, not by the length of a step's longest request: a token's
key is the same whoever shares its batch. For `dynamic` that is exact, since no request is longer
than `max_position_embeddings`; `longrope` takes its long factors when requests may be longer than
the length that the model was first trained with.

Legend: T tokens, d head dim, r rotated dims of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moed.config.errors import ModelError

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotary:
    """One model's embedding."""

    frequencies: tuple[float, ...]
    """[r / 2]."""
    scale: float = 1.0
    """Of cosine and sine (yarn, longrope)."""
    is_interleaved: bool = False
    """Pairs are neighbours, (0, 1), (2, 3), …; else (0, r / 2), (1, r / 2 + 1), …"""

    @property
    def num_dims(self) -> int:
        """r."""
        return 2 * len(self.frequencies)

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> Tables:
        """Cosine and signed sine, each [T, 1, r], for `positions` [T]."""
        angles = positions.float()[:, None, None] * _on(self.frequencies, positions.device)
        cosine, sine = (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
        if self.is_interleaved:
            signed = torch.stack([-sine, sine], dim=-1).flatten(-2)
            return cosine.repeat_interleave(2, dim=-1), signed
        return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)

    def rotate(self, states: torch.Tensor, tables: Tables) -> torch.Tensor:
        """The first r of each head's d dims turned, for `states` [T, heads, d]."""
        cosine, sine = tables
        turned = states[..., : self.num_dims]
        if self.is_interleaved:
            swapped = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            # A roll by half a head swaps the halves.
            swapped = torch.roll(turned, self.num_dims // 2, dims=-1)
        rotated = turned * cosine + swapped * sine
        if self.num_dims == states.shape[-1]:
            return rotated
        return torch.cat([rotated, states[..., self.num_dims :]], dim=-1)


@cache
def _on(frequencies: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """[r / 2] float32, moved once: a step that is recorded as a graph may move nothing."""
    return torch.tensor(frequencies, device=device)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_scaling` with what stood beside it (4)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if rope.get(name) is None and config.get(name) is not None:
            rope[name] = config[name]
    kind = rope.get("rope_type", rope.get("type")) or "default"
    # Positions by time, height and width: of text all three are the same.
    rope["rope_type"] = "default" if kind == "mrope" else kind
    return rope


def make_rotary(
    config: Mapping[str, Any],
    head_dim: int,
    max_length: int,
    *,
    theta: float,
    partial: float = 1.0,
    is_interleaved: bool = False,
) -> Rotary:
    """From config.json; `theta` and `partial` are what the family takes for missing fields, and
    `max_length` is the longest request. Raises `ModelError` naming an unknown type or a missing
    field.
    """
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in _KINDS:
        raise ModelError(f"rope_type {kind!r} is not served; served are {', '.join(_KINDS)}")
    share = rope.get("partial_rotary_factor")
    num_dims = int(head_dim * (partial if share is None else share))
    given = rope.get("rope_theta")
    base = theta if given is None else float(given)
    lengths = _Lengths(int(config["max_position_embeddings"]), max_length)
    try:
        frequencies, scale = _KINDS[kind](rope, base, num_dims, lengths)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"rope_type {kind!r}: {error} is missing or wrong in {rope}") from None
    return Rotary(tuple(frequencies.tolist()), scale, is_interleaved)


@dataclass(frozen=True)
class _Lengths:
    max_position_embeddings: int
    max_length: int


_Made = tuple[torch.Tensor, float]


def _plain(base: float, num_dims: int) -> torch.Tensor:
    steps = torch.arange(0, num_dims, 2, dtype=torch.float32)
    return torch.as_tensor(1.0 / base ** (steps / num_dims))


def _default(rope: Mapping[str, Any], base: float, num_dims: int, _: _Lengths) -> _Made:
    return _plain(base, num_dims), 1.0


def _linear(rope: Mapping[str, Any], base: float, num_dims: int, _: _Lengths) -> _Made:
    return _plain(base, num_dims) / float(rope["factor"]), 1.0


def _dynamic(rope: Mapping[str, Any], base: float, num_dims: int, _: _Lengths) -> _Made:
    """NTK by length begins beyond `max_position_embeddings`; Hunyuan's `alpha` holds always."""
    if rope.get("alpha"):
        base = base * float(rope["alpha"]) ** (num_dims / (num_dims - 2))
    return _plain(base, num_dims), 1.0


def _yarn(rope: Mapping[str, Any], base: float, num_dims: int, lengths: _Lengths) -> _Made:
    """https://arxiv.org/abs/2309.00071"""
    trained = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or lengths.max_position_embeddings / trained
    scale = rope.get("attention_factor")
    if scale is None:
        above, below = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = yarn_scale(factor, 1.0)
        if above and below:
            scale = yarn_scale(factor, above) / yarn_scale(factor, below)

    def dim_of(num_turns: float) -> float:
        """The dim that turns this often over the trained length."""
        return num_dims * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(num_dims // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    plain = _plain(base, num_dims)
    return plain / factor * (1 - kept) + plain * kept, float(scale)


def yarn_scale(factor: float, weight: float) -> float:
    """yarn's scale of attention for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: Mapping[str, Any], base: float, num_dims: int, lengths: _Lengths) -> _Made:
    """https://arxiv.org/abs/2402.13753"""
    trained = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or lengths.max_position_embeddings / trained
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    is_long = lengths.max_length > trained
    # PhiMoE's name for the same, by length.
    scale = rope.get("long_mscale" if is_long else "short_mscale") or scale
    stretch = torch.tensor(rope["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    if stretch.shape != (num_dims // 2,):
        raise ValueError(f"a factor for each of {num_dims // 2} frequencies")
    return _plain(base, num_dims) / stretch, float(scale)


def _llama3(rope: Mapping[str, Any], base: float, num_dims: int, _: _Lengths) -> _Made:
    factor, trained = float(rope["factor"]), rope["original_max_position_embeddings"]
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    plain = _plain(base, num_dims)
    waves = 2 * math.pi / plain
    smooth = (trained / waves - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(waves > trained / low, plain / factor, between)
    return torch.where(waves < trained / high, plain, scaled), 1.0


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
ROPE_TYPES = tuple(_KINDS)
