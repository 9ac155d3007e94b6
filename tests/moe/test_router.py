"""Routing: worked out by hand, ties by id."""

from typing import Any

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moed.moe.router import RouterSpec, Scoring, route


def logits_of(*weights: float) -> torch.Tensor:
    """[1, E] whose softmax is these weights."""
    return torch.tensor([weights]).log()


@pytest.mark.parametrize(
    ("renormalize", "expected"), [(False, [0.4, 0.3]), (True, [0.4 / 0.7, 0.3 / 0.7])]
)
def test_the_likeliest_experts(renormalize: bool, expected: list[float]) -> None:
    weights, ids = route(logits_of(0.1, 0.4, 0.2, 0.3), RouterSpec(2, renormalize))
    assert ids.tolist() == [[1, 3]] and ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_of_equals_the_lower_id_comes_first() -> None:
    # 64 experts, since short rows are sorted by another algorithm.
    logits = torch.zeros(3, 64)
    logits[1, [50, 20, 60]] = 1.0
    logits[2, 63] = 1.0
    _, ids = route(logits, RouterSpec(4, True))
    assert ids.tolist() == [[0, 1, 2, 3], [20, 50, 60, 0], [63, 0, 1, 2]]


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_sums(num_rows: int, dtype: torch.dtype) -> None:
    logits = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights, ids = route(logits, RouterSpec(3, True))
    assert weights.shape == ids.shape == (num_rows, 3)
    assert weights.is_contiguous() and ids.is_contiguous()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(num_rows))


def test_renormalizing_is_a_softmax_over_the_chosen() -> None:
    """What Mixtral's definition says."""
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    weights, _ = route(logits, RouterSpec(2, True))
    chosen = logits.topk(2, dim=-1).values
    torch.testing.assert_close(weights, torch.softmax(chosen, dim=-1))


def test_all_experts_chosen() -> None:
    weights, ids = route(logits_of(0.25, 0.75), RouterSpec(2, False))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.25]]))


def test_a_correction_chooses_and_does_not_weigh() -> None:
    """Sigmoids 0.5, 0.6, 0.7 and 0.8; corrected, the first and the last are ahead."""
    scores = torch.tensor([[0.5, 0.6, 0.7, 0.8]])
    correction = torch.tensor([0.4, 0.0, 0.0, 0.05])
    spec = RouterSpec(2, renormalize=False, scoring=Scoring.SIGMOID, scale=2.5)
    weights, ids = route(scores.logit(), spec, correction)
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5 * 2.5, 0.8 * 2.5]]))


def test_only_the_best_groups_are_chosen_from() -> None:
    """Groups (0, 1), (2, 3), (4, 5) have 0.9, 1.1 and 1.0 together; the single best is in the
    first.
    """
    scores = torch.tensor([[0.85, 0.05, 0.5, 0.6, 0.8, 0.2]])
    spec = RouterSpec(3, True, Scoring.SIGMOID, num_groups=3, num_chosen_groups=2)
    weights, ids = route(scores.logit(), spec)
    assert ids.tolist() == [[4, 3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.6, 0.5]]) / 1.9)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_the_sparse_mixer_equals_transformers(jitter: float) -> None:
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(2))
    logits[:100] *= 0.1
    found: Any = sparsemixer(logits, jitter, training=False)  # type: ignore[no-untyped-call]
    expected_weights, expected_ids = found
    spec = RouterSpec(2, renormalize=False, scoring=Scoring.SPARSE_MIXER, jitter=jitter)
    weights, ids = route(logits, spec)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)
    # Nearly always others come near, unless none may.
    assert ((weights < 0.999).float().mean() > 0.5) == (jitter > 0.1)


def test_large_sigmoids_are_chosen_by_their_logits() -> None:
    """In float32 both are 1."""
    spec = RouterSpec(1, renormalize=False, scoring=Scoring.SIGMOID)
    _, ids = route(torch.tensor([[30.0, 40.0, -1.0]]), spec)
    assert ids.tolist() == [[1]]
