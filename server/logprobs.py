"""Log-probabilities of given tokens, with their rank and the most likely alternatives.

They belong to the distribution as the model gave it, before penalties, temperature and filters.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moed.server.messages import TokenLogprobs

# Rows whose log-probabilities are held at once: a prompt of B tokens times V would be gigabytes.
MAX_ROWS = 64


class Wanted(NamedTuple):
    """One row of logits, the token whose log-probability is wanted, and how many alternatives."""

    row: int
    token_id: int
    num_top: int


def token_logprobs(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[TokenLogprobs]:
    """One result for each of `wanted`, in order. `logits` [J, V] float32, unchanged."""
    by_num_top: defaultdict[int, list[int]] = defaultdict(list)
    for place, entry in enumerate(wanted):
        by_num_top[entry.num_top].append(place)
    results: dict[int, TokenLogprobs] = {}
    # Grouped, since among equal logits `topk` may pick others for another k: what a request gets
    # must not depend on what its batch-mates ask for.
    for num_top, places in by_num_top.items():
        for start in range(0, len(places), MAX_ROWS):
            part = places[start : start + MAX_ROWS]
            scored = _score(logits, [wanted[place] for place in part], num_top)
            results.update(zip(part, scored, strict=True))
    return [results[place] for place in range(len(wanted))]


def _score(logits: torch.Tensor, wanted: list[Wanted], num_top: int) -> list[TokenLogprobs]:
    rows = torch.tensor([entry.row for entry in wanted], device=logits.device)
    token_ids = torch.tensor([[entry.token_id] for entry in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[rows], dim=1)  # [n, V]
    chosen = logprobs.gather(1, token_ids)  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top_logprobs, top_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    return [
        TokenLogprobs(logprob, rank, ids, values)
        for logprob, rank, ids, values in zip(
            chosen[:, 0].tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top_logprobs.tolist(),
            strict=True,
        )
    ]
