"""What a request's parameters do to its logits before a token is chosen: bias, ruled-out stop
tokens, penalties, the end of reasoning. Each rule touches only the tokens that it names, for all
rows at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moed.server.request import Request

# White space, at most.
MAX_TOKENS_BEFORE_REASONING = 4


class _Entries:
    """(row, token id, value) of many rows, gathered and then turned into tensors once."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._token_ids: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, values: npt.ArrayLike | float = 0.0) -> None:
        ids = np.asarray(token_ids, dtype=np.int64)
        self._rows.append(np.full(ids.shape, row, dtype=np.int64))
        self._token_ids.append(ids)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), ids.shape))

    def tensors(
        self, like: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """((rows [n], token ids [n]), values [n]) on the device of `like`; None without any."""
        if not self._rows:
            return None
        rows, token_ids, values = (
            torch.from_numpy(np.concatenate(parts)).to(like.device)
            for parts in (self._rows, self._token_ids, self._values)
        )
        return (rows, token_ids), values


def is_ruled(request: Request) -> bool:
    """True when `apply_rules` could change its logits."""
    params = request.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or request.num_output_tokens < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or forced_token(request) is not None
    )


def forced_token(request: Request) -> int | None:
    """The token that ends the reasoning, in the step in which it has had all that it may have."""
    limit = request.params.reasoning_limit
    if limit is None:
        return None
    first = request.num_prompt_tokens
    if limit.begin_id is not None:
        opening = request.token_ids[first : first + MAX_TOKENS_BEFORE_REASONING]
        if limit.begin_id not in opening:
            return None
        first += opening.index(limit.begin_id) + 1
    if len(request.token_ids) != first + limit.max_tokens:
        return None
    is_over = any(end_id in request.token_ids[first:] for end_id in limit.end_ids)
    return None if is_over else limit.end_ids[0]


def apply_rules(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Bias, what is allowed, `min_tokens`, penalties, then what is forced, on `logits` [R, V]
    float32 in place.
    """
    _add_bias(logits, requests)
    _keep_allowed(logits, requests)
    _rule_out_bad_words(logits, requests)
    _rule_out_stop_tokens(logits, requests)
    _penalize_repetition(logits, requests)
    _penalize_outputs(logits, requests)
    _force(logits, requests)


def _add_bias(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    entries = _Entries()
    for row, request in enumerate(requests):
        if bias := request.params.logit_bias:
            entries.add(row, list(bias), list(bias.values()))
    if (found := entries.tensors(logits)) is not None:
        index, values = found
        logits[index] += values


def _keep_allowed(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        if (allowed := request.params.allowed_token_ids) is not None:
            index = torch.tensor(allowed, dtype=torch.int64, device=logits.device)
            kept = logits[row, index]
            logits[row] = -torch.inf
            logits[row, index] = kept


def _rule_out_bad_words(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """The last token of each word whose other tokens are the output's last ones."""
    entries = _Entries()
    for row, request in enumerate(requests):
        outputs = request.token_ids[request.num_prompt_tokens :] if request.params.bad_words else []
        for word in request.params.bad_words:
            before = word[:-1]
            if not before or outputs[-len(before) :] == before:
                entries.add(row, word[-1:], -np.inf)
    if (found := entries.tensors(logits)) is not None:
        index, values = found
        logits[index] = values


def _rule_out_stop_tokens(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    entries = _Entries()
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            # A stop token beyond the vocabulary never comes.
            stops = [t for t in request.params.stop_token_ids if 0 <= t < logits.shape[1]]
            entries.add(row, stops, -np.inf)
    if (found := entries.tensors(logits)) is not None:
        index, values = found
        logits[index] = values


def _penalize_repetition(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Tokens of prompt and output: positive logits are divided, negative ones multiplied."""
    entries = _Entries()
    for row, request in enumerate(requests):
        if request.params.repetition_penalty != 1.0:
            entries.add(row, np.unique(request.token_ids), request.params.repetition_penalty)
    if (found := entries.tensors(logits)) is not None:
        index, penalties = found
        current = logits[index]
        logits[index] = torch.where(current > 0, current / penalties, current * penalties)


def _penalize_outputs(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Tokens of the output: `frequency_penalty` for each time, `presence_penalty` once."""
    entries = _Entries()
    for row, request in enumerate(requests):
        params = request.params
        if (params.frequency_penalty or params.presence_penalty) and request.num_output_tokens:
            outputs = request.token_ids[request.num_prompt_tokens :]
            token_ids, counts = np.unique(outputs, return_counts=True)
            entries.add(row, token_ids, params.frequency_penalty * counts + params.presence_penalty)
    if (found := entries.tensors(logits)) is not None:
        index, penalties = found
        logits[index] -= penalties


def _force(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        if (token_id := forced_token(request)) is not None:
            logits[row] = -torch.inf
            logits[row, token_id] = 0.0
