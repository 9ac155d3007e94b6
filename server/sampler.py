"""From logits to tokens, for all requests of a step together.

Legend: J rows of logits, R requests that choose a token, V vocabulary.

Order, as in vLLM's V1 engine: log-probabilities of the distribution as the model gave it; then
`logit_bias`, `allowed_token_ids`, `bad_words`; `min_tokens` (stop tokens are ruled out);
repetition, frequency and presence penalties; what a grammar allows; greedy requests take the first
maximum; the others go on with temperature, `min_p`, `top_k`, `top_p`, and one draw. No row's result
depends on another row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moed.server.draw import draw, filtered_weights, uniform
from moed.server.grammar_masks import TokenMasks
from moed.server.logits_rules import apply_rules, is_ruled
from moed.server.logprobs import Wanted, token_logprobs
from moed.server.messages import TokenLogprobs
from moed.server.request import Request
from moed.server.scheduler import Sampled, Schedule, ScheduledRequest

# A smaller temperature is greedy: nothing but an all but exact tie could be drawn differently.
GREEDY_TEMPERATURE = 1e-5

NOT_FINITE = "the model's logits are not finite numbers; the checkpoint or its dtype is at fault"
NOTHING_LEFT = (
    "logit_bias, allowed_token_ids, bad_words, min_tokens and the grammar leave no token to choose"
)


@dataclass(frozen=True)
class _Rows:
    """Where one scheduled request's logits lie: `start` to `end` of J; it chooses by the last."""

    scheduled: ScheduledRequest
    start: int
    end: int

    @property
    def chooses(self) -> bool:
        return self.scheduled.samples and self.scheduled.request.wants_token


@dataclass(frozen=True)
class _Choice:
    token_id: int
    is_possible: bool


@torch.inference_mode()
def sample(schedule: Schedule, logits: torch.Tensor, masks: TokenMasks) -> list[Sampled]:
    """One result per scheduled request. `logits` [J, V] float32, unchanged, J rows in the order of
    the requests' `logits_positions`. `masks` holds those of all requests with a grammar.

    Logits that are not numbers give their request an error and leave the others alone.
    """
    if logits.shape[0] == 0:
        return [Sampled(None, None, (), None) for _ in schedule.requests]
    ends: list[int] = np.cumsum([len(s.logits_positions) for s in schedule.requests]).tolist()
    parts = [
        _Rows(scheduled, end - len(scheduled.logits_positions), end)
        for scheduled, end in zip(schedule.requests, ends, strict=True)
    ]
    maxima, most_likely = first_maxima(logits)
    is_finite: list[bool] = maxima.isfinite().tolist()
    choices = _choose(parts, logits, most_likely.tolist(), masks)
    wanted = [_wanted(rows, choice) for rows, choice in zip(parts, choices, strict=True)]
    scores = iter(token_logprobs(logits, [entry for entries in wanted for entry in entries]))
    results = []
    for rows, choice, entries in zip(parts, choices, wanted, strict=True):
        scored = [next(scores) for _ in entries]
        result = _result(rows, choice, scored, all(is_finite[rows.start : rows.end]))
        error = masks.error(rows.scheduled.request)
        results.append(result if error is None else replace(result, error=error))
    return results


def _choose(
    parts: list[_Rows], logits: torch.Tensor, most_likely: list[int], masks: TokenMasks
) -> list[_Choice | None]:
    """For each request that chooses a token in this step, its choice. Plain greedy ones, the usual
    load, cost nothing more than the maximum that is known already.
    """
    special = [r for r in parts if r.chooses and not _is_plain(r.scheduled.request)]
    found: Iterator[_Choice] = iter(())
    if special:
        last = torch.tensor([rows.end - 1 for rows in special], device=logits.device)
        requests = [rows.scheduled.request for rows in special]
        tokens, is_possible = choose_tokens(logits[last], requests, masks)
        found = map(_Choice, tokens.tolist(), is_possible.tolist())
    choices: list[_Choice | None] = []
    for rows in parts:
        if not rows.chooses:
            choices.append(None)
        elif _is_plain(rows.scheduled.request):
            choices.append(_Choice(most_likely[rows.end - 1], True))
        else:
            choices.append(next(found))
    return choices


def _is_plain(request: Request) -> bool:
    params = request.params
    is_free = params.grammar is None and not is_ruled(request)
    return params.temperature < GREEDY_TEMPERATURE and is_free


def _wanted(rows: _Rows, choice: _Choice | None) -> list[Wanted]:
    """The log-probabilities that one request wants: of its prompt, then of the chosen token."""
    request, params = rows.scheduled.request, rows.scheduled.request.params
    wanted = [
        Wanted(row, request.token_ids[position + 1], params.prompt_logprobs or 0)
        for row, position in enumerate(rows.scheduled.prompt_logprob_positions, rows.start)
    ]
    if choice is not None and params.logprobs is not None:
        wanted.append(Wanted(rows.end - 1, choice.token_id, params.logprobs))
    return wanted


def _result(
    rows: _Rows, choice: _Choice | None, scores: list[TokenLogprobs], is_finite: bool
) -> Sampled:
    num_prompt = len(rows.scheduled.prompt_logprob_positions)
    error = None
    if not is_finite:
        error = NOT_FINITE
    elif choice is not None and not choice.is_possible:
        error = NOTHING_LEFT
    return Sampled(
        token_id=None if choice is None else choice.token_id,
        logprobs=scores[num_prompt] if len(scores) > num_prompt else None,
        prompt_logprobs=scores[:num_prompt],
        error=error,
    )


def choose_tokens(
    logits: torch.Tensor, requests: Sequence[Request], masks: TokenMasks
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each request: ([R] int64, [R] bool, False where no token was left).

    `logits` [R, V] float32 is overwritten.
    """
    apply_rules(logits, requests)
    masks.apply(logits, requests)
    maxima, token_ids = first_maxima(logits)
    is_possible = maxima.isfinite()
    if not is_possible.all():
        # Such rows are lost anyhow; zeros keep their arithmetic harmless.
        logits[~is_possible], maxima[~is_possible] = 0.0, 0.0
    drawing = [i for i, r in enumerate(requests) if r.params.temperature >= GREEDY_TEMPERATURE]
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        own, highest = logits, maxima
        if len(drawing) < len(requests):
            own, highest = logits[rows], maxima[rows]
        weights = filtered_weights(own, highest, [requests[i].params for i in drawing])
        numbers = [uniform(requests[i].params.seed, requests[i].num_output_tokens) for i in drawing]
        token_ids[rows] = draw(weights, numbers)
    return token_ids, is_possible


def first_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of [J, V], [J] float32, and the first id that has it, [J] int64. NaN
    is the largest.
    """
    if logits.device.type != "cpu":
        return logits.max(dim=1)
    # torch's own search for the place is many times slower on a CPU.
    ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, ids[:, None])[:, 0], ids
