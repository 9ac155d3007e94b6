"""Rotary embedding against the functions of `transformers`."""

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from moed.config.errors import ModelError
from moed.moe.rotary import make_rotary

HEAD_DIM = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + step / 10 for step in range(HEAD_DIM // 2)],
    "long_factor": [1.5 + step for step in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 512,
}


def config_of(rope: dict[str, Any]) -> Any:
    return Qwen3MoeConfig(  # type: ignore[call-arg]
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 1e4, **rope},
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        {**YARN, "factor": None},
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "partial_rotary_factor": 0.5},
        LLAMA3,
    ],
    ids=str,
)
def test_frequencies_and_scale(rope: dict[str, Any]) -> None:
    config = config_of(rope)
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    rotary = make_rotary(config.to_dict(), HEAD_DIM, 2048, theta=5.0)
    assert rotary.scale == pytest.approx(scale)
    torch.testing.assert_close(torch.tensor(rotary.frequencies), expected)


@pytest.mark.parametrize("longest", [512, 513])
def test_longrope_stretches_for_requests_beyond_the_trained_length(longest: int) -> None:
    config = config_of(LONG)
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=longest)
    rotary = make_rotary(config.to_dict(), HEAD_DIM, longest, theta=5.0)
    assert rotary.scale == pytest.approx(scale)
    torch.testing.assert_close(torch.tensor(rotary.frequencies), expected)


def test_tables_and_rotation() -> None:
    config = config_of({"rope_type": "default"})
    positions = torch.tensor([0, 1, 7, 2000])
    states = torch.randn(4, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cosine, sine = Qwen3MoeRotaryEmbedding(config)(states, positions[None])
    halves = torch.cat([-states[..., HEAD_DIM // 2 :], states[..., : HEAD_DIM // 2]], dim=-1)
    expected = states * cosine[0][:, None] + halves * sine[0][:, None]
    rotary = make_rotary(config.to_dict(), HEAD_DIM, 2048, theta=5.0)
    torch.testing.assert_close(
        rotary.rotate(states, rotary.tables(positions, torch.float32)), expected
    )


def test_interleaved_pairs_are_neighbours() -> None:
    """Each pair (a, b), as a complex number, is turned by position times frequency."""
    rotary = make_rotary(
        {"max_position_embeddings": 64}, 8, 64, theta=100.0, partial=0.5, is_interleaved=True
    )
    assert rotary.num_dims == 4
    states = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
    found = rotary.rotate(states, rotary.tables(torch.tensor([3]), torch.float32))
    for pair, frequency in enumerate((1.0, 0.1)):
        a, b = states[0, :, 2 * pair], states[0, :, 2 * pair + 1]
        turned = torch.complex(a, b) * torch.exp(torch.tensor(3j * frequency))
        torch.testing.assert_close(found[0, :, 2 * pair], turned.real)
        torch.testing.assert_close(found[0, :, 2 * pair + 1], turned.imag)
    assert torch.equal(found[..., 4:], states[..., 4:])


def test_fields_beside_rope_scaling() -> None:
    """As transformers 4 wrote them."""
    old = {
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
    }
    new = config_of({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}).to_dict()
    assert make_rotary(old, HEAD_DIM, 64, theta=5.0) == make_rotary(new, HEAD_DIM, 64, theta=5.0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type 'spiral' is not served; served are default, linear"),
        ({"rope_type": "linear"}, "rope_type 'linear': 'factor' is missing or wrong"),
        ({"type": "yarn", "factor": 2.0}, "'original_max_position_embeddings' is missing or wrong"),
        ({**LONG, "long_factor": [1.0]}, "a factor for each of 16 frequencies is missing or wrong"),
    ],
)
def test_what_is_not_served(rope: dict[str, Any], message: str) -> None:
    config = {"max_position_embeddings": 2048, "rope_parameters": rope}
    with pytest.raises(ModelError, match=message):
        make_rotary(config, HEAD_DIM, 2048, theta=1e4)


@pytest.mark.parametrize(("longest", "scale"), [(512, 1.2), (513, 1.4)])
def test_scales_of_longrope_by_length(longest: int, scale: float) -> None:
    """As PhiMoE's config.json has them."""
    config = config_of({**LONG, "short_mscale": 1.2, "long_mscale": 1.4}).to_dict()
    assert make_rotary(config, HEAD_DIM, longest, theta=5.0).scale == scale
