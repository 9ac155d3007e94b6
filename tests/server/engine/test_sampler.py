"""The sampler against hand arithmetic, plain references and `torch.log_softmax`."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from moed.server.draw import draw, filtered_weights, keep_top_p, uniform
from moed.server.grammar_masks import NO_MASKS
from moed.server.messages import ReasoningLimit, SamplingParams
from moed.server.request import Request
from moed.server.sampler import choose_tokens, sample
from moed.server.scheduler import Sampled, Schedule, ScheduledRequest
from tests.server.engine.fakes import make_request

V = 50
GREEDY: dict[str, Any] = {"temperature": 0.0}


def request(prompt: list[int], output: list[int], **params: Any) -> Request:
    message = make_request("r", prompt, 100, output_token_ids=output, **params)
    made = Request.from_message(message, 0, 10_000)
    made.num_computed_tokens = made.num_tokens - 1
    return made


def run(logits: torch.Tensor, *requests: Request) -> list[Sampled]:
    """One decode step of `requests`, one row of logits each."""
    scheduled = tuple(ScheduledRequest(r, 1, range(0), True) for r in requests)
    return sample(Schedule(scheduled, len(scheduled)), logits, NO_MASKS)


def choose(logits: list[float] | torch.Tensor, made: Request) -> int | None:
    return run(torch.as_tensor(logits, dtype=torch.float32)[None], made)[0].token_id


def random_logits(rows: int, seed: int, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_first_maximum() -> None:
    assert choose([0.0, 5.0, 1.0, 5.0], request([0], [], **GREEDY)) == 1


@pytest.mark.parametrize("temperature", [1e-7, 1e-30, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(1, 0)
    for seed in range(20):
        made = request([0], [], temperature=temperature, seed=seed)
        assert choose(logits[0] * 1e6, made) == int(logits.argmax())


def test_small_temperature_does_not_overflow() -> None:
    logits = torch.full((V,), -3e38)
    logits[7] = 3e38
    assert choose(logits, request([0], [], temperature=2e-5)) == 7


# Weights: logits are logs of simple fractions, so that the expected sets are seen at once. --------

FRACTIONS = [0.4, 0.05, 0.3, 0.05, 0.2]


def weights(**params: Any) -> list[float]:
    """Normalized weights of FRACTIONS under the filters."""
    made = SamplingParams(**{"max_tokens": 1, "seed": 0, "temperature": 1.0, **params})
    logits = torch.tensor(FRACTIONS).log()[None]
    found = filtered_weights(logits, [made])[0]
    values: list[float] = (found / found.sum()).tolist()
    return [round(value, 6) for value in values]


def test_no_filter_keeps_the_distribution() -> None:
    assert weights() == pytest.approx(FRACTIONS, abs=1e-6)


def test_temperature_raises_probabilities_to_a_power() -> None:
    # At temperature 1/2 probabilities are squared: 0.16 0.0025 0.09 0.0025 0.04, sum 0.295.
    squares = [p * p / 0.295 for p in FRACTIONS]
    assert weights(temperature=0.5) == pytest.approx(squares, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 2]),
        # Tokens 1 and 3 are equal: both stay when one does.
        ({"top_k": 4}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        # 0.4 alone is below 0.41, so the next one comes in.
        ({"top_p": 0.41}, [0, 2]),
        ({"top_p": 0.89}, [0, 2, 4]),
        # Of the two equal ones the lower id goes first.
        ({"top_p": 0.93}, [0, 1, 2, 4]),
        ({"top_p": 1e-9}, [0]),
        # 0.4 * 0.5 = 0.2, and 0.2 is just about there; 0.49 is safely below it.
        ({"min_p": 0.49}, [0, 2, 4]),
        ({"min_p": 0.6}, [0, 2]),
        ({"min_p": 1.0}, [0]),
        # top_k first: of 0.4 0.3 the first is 4/7 = 0.571 of the mass, enough for 0.57.
        ({"top_k": 2, "top_p": 0.57}, [0]),
        ({"top_k": 2, "top_p": 0.58}, [0, 2]),
        # Temperature before min_p: squared, 0.09 / 0.16 = 0.5625.
        ({"temperature": 0.5, "min_p": 0.57}, [0]),
        ({"temperature": 0.5, "min_p": 0.56}, [0, 2]),
    ],
)
def test_filters_keep(params: dict[str, Any], kept: list[int]) -> None:
    found = weights(**params)
    assert [token for token, weight in enumerate(found) if weight > 0] == kept
    power = 1 / params.get("temperature", 1.0)
    mass = sum(FRACTIONS[token] ** power for token in kept)
    for token in kept:
        assert found[token] == pytest.approx(FRACTIONS[token] ** power / mass, abs=1e-6)


@pytest.mark.parametrize("num_candidates", [1, 3, 8, 40, 400])
def test_top_p_is_the_same_however_many_candidates_it_starts_with(num_candidates: int) -> None:
    """Whole numbers, so that many are equal, also at the borders."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 5, (60, 40), generator=generator).float()
    weights[:, 0] = 5.0
    shares = torch.rand(60, 1, generator=generator, dtype=torch.float64)
    found = keep_top_p(weights, shares, num_candidates)
    for row, share, kept in zip(
        weights.tolist(), shares[:, 0].tolist(), found.tolist(), strict=True
    ):
        expected, mass = [0.0] * 40, 0.0
        for token in sorted(range(40), key=lambda token: (-row[token], token)):  # noqa: B023
            if mass < share * sum(row):
                expected[token] = row[token]
            mass += row[token]
        assert kept == expected


def test_draw_is_the_inverse_of_the_cumulated_distribution() -> None:
    # Borders at 1, 1, 4, 4 of 4: numbers up to 1/4 fall on token 0, the others on token 2.
    row = torch.tensor([[1.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    numbers = [0.0, 0.2499, 0.25, 0.99, 1 - 2**-53]
    found = [int(draw(row, [number])) for number in numbers]
    assert found == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 511, 512, 1000])
def test_draw_finds_its_token_in_any_block(num_tokens: int) -> None:
    """Whole numbers, whose sums are exact in any order, many of them 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.randint(-3, 4, (50, num_tokens), generator=generator).clamp(min=0).float()
    rows[:, -1] = 1.0
    numbers = torch.rand(50, generator=generator, dtype=torch.float64).tolist()
    numbers[:3] = [0.0, 1 - 2**-53, 0.5]
    found = draw(rows, numbers)
    sums = rows.double().cumsum(dim=1)
    for row, token, number in zip(range(50), found.tolist(), numbers, strict=True):
        target = min(number * float(sums[row, -1]), math.nextafter(float(sums[row, -1]), 0))
        assert rows[row, token] > 0
        assert float(sums[row, token]) > target >= float(sums[row, token] - rows[row, token])


def test_draw_never_takes_a_token_without_weight() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(400, 700, generator=generator) ** 40
    rows[torch.rand(400, 700, generator=generator) < 0.97] = 0.0
    rows[:, 650] = 1e-30
    for number in (0.0, 0.3, 0.7, 1 - 2**-53):
        tokens = draw(rows, [number] * 400)
        assert bool((rows.gather(1, tokens[:, None]) > 0).all())


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor(FRACTIONS).log()
    count = 4000
    requests = [request([0], [], temperature=1.0, seed=seed) for seed in range(count)]
    results = run(logits.expand(count, -1), *requests)
    drawn = [result.token_id for result in results]
    for token, probability in enumerate(FRACTIONS):
        # Five standard deviations.
        margin = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(drawn.count(token) / count - probability) < margin


def test_numbers_are_uniform_and_a_pure_function_of_seed_and_index() -> None:
    values = np.array([[uniform(seed, index) for index in range(40)] for seed in range(40)])
    assert len(np.unique(values)) == 1600
    assert 0 <= values.min() < 0.01 and 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 5 / math.sqrt(12 * 1600)
    assert uniform(2**64 - 1, 3) == uniform(2**64 - 1, 3) != uniform(2**64 - 2, 3)
    # Neighbours along either axis do not move together.
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.15
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.15


def test_draws_are_fixed_for_ever() -> None:
    """A resumed request on another version must go on with the same numbers."""
    # numpy's Philox with key 42 at counters 0 and 1, the first number of each.
    first = np.random.Generator(np.random.Philox(key=42))
    expected = first.random(8)[[0, 4]].tolist()
    assert [uniform(42, 0), uniform(42, 1)] == expected


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_p": 0.8},
    {"temperature": 1.0, "seed": 3, "top_k": 5},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 3},
    {"temperature": 2.0, "seed": 6, "logit_bias": {3: 5.0, 9: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "seed": 7, "min_tokens": 9, "stop_token_ids": [1, 2]},
]


def test_result_depends_on_no_batch_mate() -> None:
    for trial in range(10):
        logits = random_logits(len(PARAMS), trial)
        requests = [request([1, 2, 3], [4, 4, 5] * trial, **params) for params in PARAMS]
        together = run(logits, *requests)
        alone = [run(logits[i : i + 1], made)[0] for i, made in enumerate(requests)]
        backwards = run(logits.flip(0), *reversed(requests))[::-1]
        assert together == alone == backwards


def test_seed_decides_and_output_index_moves_on() -> None:
    logits = torch.zeros(V)
    drawn = {
        (s, n): choose(logits, request([0], [1] * n, temperature=1.0, seed=s))
        for s in range(5)
        for n in range(20)
    }
    again = {
        (s, n): choose(logits, request([9, 9], [2] * n, temperature=1.0, seed=s))
        for s in range(5)
        for n in range(20)
    }
    assert drawn == again
    assert len({tuple(drawn[s, n] for n in range(20)) for s in range(5)}) == 5


# Penalties, bias, min_tokens: prompt [0, 1], output [1, 2, 2], logits 2 -2 3 1. ------------------


def after_rules(logits: list[float], **params: Any) -> list[float]:
    row = torch.tensor([logits])
    choose_tokens(row, [request([0, 1], [1, 2, 2], **{"temperature": 0.0, **params})], NO_MASKS)
    values: list[float] = row[0].tolist()
    return values


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [2, -2, 3, 1]),
        # Prompt and output tokens 0, 1, 2: positive ones halved, negative ones doubled.
        ({"repetition_penalty": 2.0}, [1, -4, 1.5, 1]),
        ({"repetition_penalty": 0.5}, [4, -1, 6, 1]),
        # Output only: token 1 once, token 2 twice.
        ({"presence_penalty": 0.5}, [2, -2.5, 2.5, 1]),
        ({"frequency_penalty": 0.5}, [2, -2.5, 2, 1]),
        ({"frequency_penalty": -0.5, "presence_penalty": 1.0}, [2, -2.5, 3, 1]),
        # Repetition first: 3 / 2 - 1 = 0.5.
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [1, -5, 0.5, 1]),
        ({"logit_bias": {3: 10.0, 0: -100.0}}, [-98, -2, 3, 11]),
        # Bias first: (2 - 4) * 2 = -4.
        ({"logit_bias": {0: -4.0}, "repetition_penalty": 2.0}, [-4, -4, 1.5, 1]),
        ({"min_tokens": 4, "stop_token_ids": [2, 999]}, [2, -2, -math.inf, 1]),
        ({"min_tokens": 3, "stop_token_ids": [2]}, [2, -2, 3, 1]),
        ({"min_tokens": 4, "stop_token_ids": [2], "logit_bias": {2: 50.0}}, [2, -2, -math.inf, 1]),
    ],
)
def test_rules_by_hand(params: dict[str, Any], expected: list[float]) -> None:
    assert after_rules([2.0, -2.0, 3.0, 1.0], **params) == pytest.approx(expected)


# Log-probabilities. ------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(1, 5)
    raw = torch.log_softmax(logits[0].double(), dim=0)
    order = raw.argsort(descending=True).tolist()
    # The bias forces token 11, whatever the model says of it.
    made = request([0], [], temperature=3.0, top_k=1, logit_bias={11: 100.0}, logprobs=4)
    (result,) = run(logits, made)
    assert result.token_id == 11 and result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(raw[11]), abs=1e-5)
    assert result.logprobs.rank == order.index(11) + 1
    assert result.logprobs.top_ids == order[:4]
    assert result.logprobs.top_logprobs == pytest.approx(raw[order[:4]].tolist(), abs=1e-5)


def test_logprobs_zero_gives_the_chosen_one_alone_and_none_gives_none() -> None:
    logits = random_logits(2, 6)
    zero, none = run(logits, request([0], [], logprobs=0), request([0], []))
    assert zero.logprobs is not None and zero.logprobs.top_ids == []
    assert zero.logprobs.rank == 1
    assert none.logprobs is None


def test_more_logprobs_than_the_vocabulary() -> None:
    (result,) = run(random_logits(1, 7), request([0], [], logprobs=V + 10))
    assert result.logprobs is not None
    assert sorted(result.logprobs.top_ids) == list(range(V))


def test_prompt_logprobs_score_the_next_prompt_token() -> None:
    made = request([3, 1, 4, 1, 5], [], prompt_logprobs=2, logprobs=1)
    made.num_computed_tokens = 0
    other = request([0], [], **GREEDY)
    scheduled = ScheduledRequest(made, 5, range(4), True)
    logits = random_logits(6, 8)
    step = Schedule((ScheduledRequest(other, 1, range(0), True), scheduled), 6)
    first, second = sample(step, logits, NO_MASKS)
    assert first.token_id == int(logits[0].argmax()) and first.prompt_logprobs == []
    assert second.token_id == int(logits[5].argmax())
    raw = torch.log_softmax(logits, dim=1)
    found = [entry.logprob for entry in second.prompt_logprobs]
    assert found == pytest.approx([float(raw[1 + i, t]) for i, t in enumerate([1, 4, 1, 5])])
    assert all(len(entry.top_ids) == 2 for entry in second.prompt_logprobs)
    assert second.logprobs is not None and second.logprobs.rank == 1


def test_piece_that_ends_inside_the_prompt_chooses_nothing() -> None:
    made = request([3, 1, 4, 1, 5], [], prompt_logprobs=0)
    made.num_computed_tokens = 0
    silent = request([1, 2, 3], [])
    silent.num_computed_tokens = 0
    step = Schedule(
        (ScheduledRequest(silent, 2, range(0), False), ScheduledRequest(made, 2, range(2), False)),
        4,
    )
    first, second = sample(step, random_logits(2, 9), NO_MASKS)
    assert (first.token_id, first.error, list(first.prompt_logprobs)) == (None, None, [])
    assert second.token_id is None and len(second.prompt_logprobs) == 2


def test_no_rows_at_all() -> None:
    assert sample(Schedule((), 0), torch.empty(0, V), NO_MASKS) == []
    made = request([1, 2, 3], [])
    step = Schedule((ScheduledRequest(made, 2, range(0), False),), 2)
    assert sample(step, torch.empty(0, V), NO_MASKS) == [Sampled(None, None, (), None)]


# Faults. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", PARAMS)
def test_logits_that_are_not_numbers_end_their_request_alone(
    bad: float, params: dict[str, Any]
) -> None:
    logits = random_logits(3, 10)
    good = run(logits[[0, 2]], request([0], [], **params), request([0], [], **params))
    logits[1, 17] = bad
    first, broken, last = run(logits, *(request([0], [], **params) for _ in range(3)))
    assert [first, last] == good
    assert broken.error is not None and "finite" in broken.error


def test_nothing_left_to_choose_is_an_error() -> None:
    made = request([0], [], temperature=1.0, min_tokens=5, stop_token_ids=list(range(V)))
    (result,) = run(random_logits(1, 11), made)
    assert result.error is not None and "min_tokens" in result.error


def test_logits_are_not_changed() -> None:
    logits = random_logits(len(PARAMS), 12)
    before = logits.clone()
    run(logits, *(request([1], [2], **params) for params in PARAMS))
    assert torch.equal(logits, before)


def test_only_allowed_tokens_are_chosen() -> None:
    logits = random_logits(1, 3)[0]
    allowed = logits.argsort()[:3].tolist()
    assert choose(logits, request([0], [], allowed_token_ids=allowed, **GREEDY)) == allowed[-1]
    for seed in range(20):
        made = request([0], [], allowed_token_ids=allowed, temperature=2.0, seed=seed)
        assert choose(logits, made) in allowed
    free = request([0], [], **GREEDY)
    bound = request([0], [], allowed_token_ids=[1], **GREEDY)
    both = run(logits.repeat(2, 1), bound, free)
    assert [result.token_id for result in both] == [1, int(logits.argmax())]


@pytest.mark.parametrize(
    ("output", "words", "expected"),
    [
        # Of tokens 4 (most likely), 3 and 2.
        ([], [[4]], 3),
        ([], [[9, 4]], 4),
        ([9], [[9, 4]], 3),
        ([8, 9], [[8, 9, 4], [3]], 2),
        ([9, 8], [[9, 4]], 4),
        ([9], [[7, 9, 4]], 4),
    ],
)
def test_bad_words_are_not_completed(
    output: list[int], words: list[list[int]], expected: int
) -> None:
    """The prompt, which ends with 9, does not begin a word."""
    logits = [0.0, 1.0, 2.0, 3.0, 4.0, *[0.0] * 5]
    assert choose(logits, request([9], output, bad_words=words, **GREEDY)) == expected


def test_nothing_is_left_to_choose() -> None:
    made = request([0], [], allowed_token_ids=[4], bad_words=[[4]], **GREEDY)
    (result,) = run(torch.zeros(1, V), made)
    assert result.error is not None and "allowed_token_ids" in result.error


@pytest.mark.parametrize(
    ("begin_id", "output", "is_forced"),
    [
        # Three tokens of reasoning, which tokens 1 and 2 end; the first of them is written.
        (None, [5, 5], False),
        (None, [5, 5, 5], True),
        (None, [5, 5, 5, 1], False),
        (None, [5, 1, 5], False),
        (None, [5, 2, 5], False),
        (9, [5, 5, 5], False),
        (9, [9, 5, 5], False),
        (9, [9, 5, 5, 5], True),
        (9, [5, 9, 5, 5, 5], True),
        (9, [5, 9, 5, 1, 5], False),
        (9, [5, 5, 5, 5, 9, 5, 5, 5], False),
    ],
)
def test_reasoning_ends_when_it_has_had_its_tokens(
    begin_id: int | None, output: list[int], is_forced: bool
) -> None:
    """The prompt, which holds an end, does not count."""
    logits = [0.0, -50.0, 2.0, 3.0, 4.0, *[0.0] * 5]
    limit = ReasoningLimit(begin_id, [1, 2], 3)
    made = request([1, 9], output, reasoning_limit=limit, **GREEDY)
    assert choose(logits, made) == (1 if is_forced else 4)


def test_reasoning_that_may_not_begin_ends_at_once_whatever_else_is_asked() -> None:
    limit = ReasoningLimit(None, [3], 0)
    params = {"reasoning_limit": limit, "temperature": 2.0, "seed": 1}
    made = request([1], [], logit_bias={3: -100.0}, bad_words=[[3]], **params)
    assert choose([1.0] * 10, made) == 3
