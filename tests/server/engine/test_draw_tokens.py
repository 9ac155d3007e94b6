"""`draw_tokens`, by the native kernel and by torch, against the filters in double precision."""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moed.moe import native
from moed.server.draw import draw_tokens, uniform, uniforms
from moed.server.messages import SamplingParams

Doubles = npt.NDArray[np.float64]


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native" and native.library() is None:
        pytest.skip("no native kernels here")
    native.use_kernels(request.param)
    yield
    native.use_kernels("auto")


def params_of(
    temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> SamplingParams:
    return SamplingParams(
        max_tokens=1, seed=0, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p
    )


def reference(logits: Doubles, params: SamplingParams) -> Doubles:
    """What the filters leave of one row, [V], adding up to 1; equal weights at the border of
    `top_k` all stay, and of `top_p` those with the lower ids.
    """
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    if 0 < params.top_k < len(weights):
        weights[weights < np.sort(weights)[-params.top_k]] = 0.0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        cut = order[before >= params.top_p * weights.sum()]
        weights[np.setdiff1d(cut, order[:1])] = 0.0
    found: Doubles = weights / weights.sum()
    return found


FILTERS = [
    {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    for min_p, top_k, top_p in itertools.product((0.0, 0.013), (0, 1, 20, 10**6), (1.0, 0.87, 0.1))
]


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 257, 1000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_each_token_has_its_stretch(
    vocab_size: int, filters: dict[str, float], temperature: float
) -> None:
    """The middle of every stretch brings its token, in the order of the vocabulary."""
    params = params_of(temperature, **filters)  # type: ignore[arg-type]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    before = logits.clone()
    for row in range(3):
        kept = reference(logits[row].double().numpy(), params)
        middles = np.cumsum(kept) - kept / 2
        clear = np.flatnonzero(kept > 1e-5)
        numbers = middles[clear].tolist()
        found = draw_tokens(logits, [row] * len(clear), [params] * len(clear), numbers)
        assert found.tolist() == clear.tolist()
    assert torch.equal(logits, before)


def test_rows_have_their_own_parameters() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    params = [params_of(**f) for f in ({}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5})]
    rows, numbers = [2, 0, 0, 1], [0.2, 0.4, 0.6, 0.8]
    together = draw_tokens(logits, rows, params, numbers).tolist()
    alone = [
        int(draw_tokens(logits, [row], [own], [number]))
        for row, own, number in zip(rows, params, numbers, strict=True)
    ]
    expected = [
        int(np.searchsorted(np.cumsum(reference(logits[row].double().numpy(), own)), number))
        for row, own, number in zip(rows, params, numbers, strict=True)
    ]
    assert together == alone == expected


def test_flat_rows_need_every_token() -> None:
    """Where all are equally likely, no first look at the likeliest is enough."""
    logits = torch.zeros(1, 4096)
    for number, top_p in ((0.0, 0.5), (0.5, 0.5), (1 - 2**-53, 0.5), (0.25, 0.125)):
        (found,) = draw_tokens(logits, [0], [params_of(top_p=top_p)], [number]).tolist()
        assert found == int(number * top_p * 4096)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_no_token_without_weight_is_drawn(number: float, filters: dict[str, float]) -> None:
    """Ruled out, or too unlikely for a number in single precision."""
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, 700] = -200.0
    logits[0, 1500] = 0.0
    params = params_of(**filters)  # type: ignore[arg-type]
    assert draw_tokens(logits, [0], [params], [number]).tolist() == [1500]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_row_without_finite_maximum_gives_some_token(bad: float, filters: dict[str, float]) -> None:
    params = params_of(**filters)  # type: ignore[arg-type]
    for logits in (
        torch.full((1, 300), bad),
        torch.zeros(1, 300).index_fill(1, torch.tensor([7]), bad),
    ):
        assert 0 <= int(draw_tokens(logits, [0], [params], [0.99])) < 300


def test_numbers_of_many_are_those_of_each() -> None:
    seeds = [0, 1, 42, 2**63, 2**64 - 1] * 40
    indices = [7 * place for place in range(len(seeds) - 1)] + [2**62]
    expected = [uniform(seed, index) for seed, index in zip(seeds, indices, strict=True)]
    assert uniforms(seeds, indices).tolist() == expected
    assert len(uniforms([], [])) == 0
