"""From logits to tokens, for all requests of a step together.

Legend: J rows of logits, R requests that choose a token, V vocabulary.

Order, as in vLLM's V1 engine: log-probabilities of the distribution as the model gave it; then
`logit_bias`, `allowed_token_ids`, `bad_words`; `min_tokens` (stop tokens are ruled out);
repetition, frequency and presence penalties; what a grammar allows; greedy requests take the first
maximum; the others go on with temperature, `min_p`, `top_k`, `top_p`, and one draw. No row's result
depends on another row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moed.server.draw import draw_tokens, uniforms
from moed.server.grammar_masks import TokenMasks
from moed.server.host_copy import HostCopy, on_device
from moed.server.logits_rules import apply_rules, is_ruled
from moed.server.logprobs import Wanted, token_logprobs
from moed.server.messages import NOTHING_LEFT, TokenLogprobs
from moed.server.request import Request
from moed.server.scheduler import Sampled, Schedule, ScheduledRequest

# A smaller temperature is greedy: nothing but an all but exact tie could be drawn differently.
GREEDY_TEMPERATURE = 1e-5

NOT_FINITE = "the model's logits are not finite numbers; the checkpoint or its dtype is at fault"


@dataclass(frozen=True)
class _Rows:
    """Where one scheduled request's logits lie: `start` to `end` of J; it chooses by the last."""

    scheduled: ScheduledRequest
    start: int
    end: int
    chooses: bool


def sample(schedule: Schedule, logits: torch.Tensor, masks: TokenMasks) -> list[Sampled]:
    """`Sampling`, and its results at once."""
    return Sampling(schedule, logits, masks).results()


class Sampling:
    """The tokens that a step chooses, begun when it is made. On a GPU they are known to the device
    alone until `results` has waited for it.
    """

    @torch.inference_mode()
    def __init__(self, schedule: Schedule, logits: torch.Tensor, masks: TokenMasks) -> None:
        """`logits` [J, V] float32, unchanged, J rows in the order of the requests'
        `logits_positions`. `masks` holds those of all requests with a grammar.
        """
        self.schedule = schedule
        self._logits, self._masks = logits, masks
        ends: list[int] = np.cumsum([len(s.logits_positions) for s in schedule.requests]).tolist()
        self._parts = [
            _Rows(scheduled, end - len(scheduled.logits_positions), end, scheduled.chooses)
            for scheduled, end in zip(schedule.requests, ends, strict=True)
        ]
        maxima, most_likely = first_maxima(logits)
        self._is_finite = HostCopy(maxima.isfinite())
        self.token_ids = most_likely
        """[R] int64 on the device of the logits; any where a request chooses none."""
        if ends != list(range(1, len(logits) + 1)):
            # A piece of a prompt may have no row at all; of what there is any will do.
            last = [max(0, min(end, len(logits)) - 1) for end in ends]
            self.token_ids = most_likely[on_device(last, logits)] if len(logits) else most_likely
        self._is_possible: HostCopy | None = None
        self._choose_special()
        self._chosen = HostCopy(self.token_ids)

    def _choose_special(self) -> None:
        """For the requests that do not just take their maximum, which costs nothing more."""
        ruled, drawn = [], []
        for place, rows in enumerate(self._parts):
            request = rows.scheduled.request
            if rows.chooses and (request.params.grammar is not None or is_ruled(request)):
                ruled.append(place)
            elif rows.chooses and _draws(request):
                drawn.append(place)
        if ruled:
            logits = self._logits[on_device(self._rows_of(ruled), self._logits)]
            requests = [self._parts[place].scheduled.request for place in ruled]
            tokens, is_possible = choose_tokens(logits, requests, self._masks)
            everyone = torch.ones(self.token_ids.shape, dtype=torch.bool, device=tokens.device)
            places = self._put(ruled, tokens)
            self._is_possible = HostCopy(everyone.index_copy_(0, places, is_possible))
        if drawn:
            requests = [self._parts[place].scheduled.request for place in drawn]
            self._put(drawn, _draw(self._logits, self._rows_of(drawn), requests))

    def _rows_of(self, places: list[int]) -> list[int]:
        """Of the logits: those from which the requests at `places` choose."""
        return [self._parts[place].end - 1 for place in places]

    def _put(self, places: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of the requests at `places`, which come back on the device."""
        found = on_device(places, self._logits)
        self.token_ids = self.token_ids.index_copy(0, found, tokens)
        return found

    @torch.inference_mode()
    def results(self) -> list[Sampled]:
        """One per scheduled request. Waits for the device.

        Logits that are not numbers give their request an error and leave the others alone.
        """
        if not len(self._logits):
            return [Sampled(None, None, (), None) for _ in self._parts]
        chosen: list[int] = self._chosen.wait().tolist()
        is_finite: list[bool] = self._is_finite.wait().tolist()
        is_possible = [True] * len(chosen)
        if self._is_possible is not None:
            is_possible = self._is_possible.wait().tolist()
        wanted = [_wanted(*entry) for entry in zip(self._parts, chosen, strict=True)]
        scores = iter(token_logprobs(self._logits, [w for entries in wanted for w in entries]))
        results = []
        for place, (rows, entries) in enumerate(zip(self._parts, wanted, strict=True)):
            scored = [next(scores) for _ in entries]
            error = self._masks.error(rows.scheduled.request)
            if error is None and not all(is_finite[rows.start : rows.end]):
                error = NOT_FINITE
            if error is None and not is_possible[place]:
                error = NOTHING_LEFT
            results.append(_result(rows, chosen[place], scored, error))
        return results


def _draws(request: Request) -> bool:
    return request.params.temperature >= GREEDY_TEMPERATURE


def _draw(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[Request]) -> torch.Tensor:
    """[R] int64: the next token of each of R requests from its row of `logits` [J, V]."""
    numbers = uniforms([r.params.seed for r in requests], [r.num_output_tokens for r in requests])
    return draw_tokens(logits, rows, [r.params for r in requests], numbers)


def _wanted(rows: _Rows, token_id: int) -> list[Wanted]:
    """The log-probabilities that one request wants: of its prompt, then of the chosen token."""
    request, params = rows.scheduled.request, rows.scheduled.request.params
    wanted = [
        Wanted(row, request.token_ids[position + 1], params.prompt_logprobs or 0)
        for row, position in enumerate(rows.scheduled.prompt_logprob_positions, rows.start)
    ]
    if rows.chooses and params.logprobs is not None:
        wanted.append(Wanted(rows.end - 1, token_id, params.logprobs))
    return wanted


def _result(rows: _Rows, token_id: int, scores: list[TokenLogprobs], error: str | None) -> Sampled:
    num_prompt = len(rows.scheduled.prompt_logprob_positions)
    return Sampled(
        token_id=token_id if rows.chooses else None,
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
    drawing = [place for place, request in enumerate(requests) if _draws(request)]
    if drawing:
        drawn = _draw(logits, drawing, [requests[place] for place in drawing])
        token_ids[on_device(drawing, logits)] = drawn
    return token_ids, maxima.isfinite()


def first_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of [J, V], [J] float32, and the first id that has it, [J] int64. NaN
    is the largest.
    """
    if logits.device.type != "cpu":
        return logits.max(dim=1)
    # torch's own search for the place is many times slower on a CPU.
    ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, ids[:, None])[:, 0], ids
