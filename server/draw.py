"""A distribution, what the filters leave of it, and one draw from that.

Legend: R rows, V vocabulary.

A draw is a pure function of (seed, output index): one number from a counter-based generator, looked
up in the cumulated probabilities *in vocabulary order*, so that a rounding difference in a logit
moves a border a little and never reorders them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moed.moe import native
from moed.server.host_copy import on_device
from moed.server.messages import SamplingParams

Doubles = npt.NDArray[np.float64]

# `top_p` looks first at the tokens of at least this share of the likeliest one's probability:
# nearly always enough, and far cheaper than sorting a vocabulary.
TOP_P_SHARE = 1e-3
MIN_TOP_P_CANDIDATES = 16
# Draws look for a block first, and then into it.
DRAW_BLOCK = 256
# What the native kernel wants to know of each (moe/native/draw.h).
DRAWING = np.dtype(
    [
        *(("row", "i8"), ("number", "f8"), ("top_p", "f8"), ("top_k", "i8")),
        *(("temperature", "f4"), ("min_p", "f4")),
    ]
)


def draw_tokens(
    logits: torch.Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    numbers: Sequence[float] | Doubles,
) -> torch.Tensor:
    """[R] int64, where `logits` [J, V] float32 are: one token from each of R `rows`, decided by a
    number in [0, 1). From a row without a finite maximum comes any token. `logits` stay as they
    are.
    """
    library = native.library() if logits.device.type == "cpu" else None
    if library is not None:
        return _draw_natively(library, logits, rows, params, numbers)
    own = logits[on_device(rows, logits)]
    # Such rows are lost anyhow; zeros keep their arithmetic harmless.
    own.masked_fill_(~own.amax(dim=1, keepdim=True).isfinite(), 0.0)
    return draw(filtered_weights(own, params), numbers)


def _draw_natively(
    library: native.Library,
    logits: torch.Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    numbers: Sequence[float] | Doubles,
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    drawings = np.array(
        [
            (row, number, p.top_p, _top_k(p, vocab_size), p.temperature, p.min_p)
            for row, p, number in zip(rows, params, numbers, strict=True)
        ],
        DRAWING,
    )
    logits = logits.contiguous()
    token_ids = torch.empty(len(drawings), dtype=torch.int64)
    library.draw(
        native.arguments(logits.dtype),
        *(logits.data_ptr(), vocab_size, drawings.ctypes.data, len(drawings), token_ids.data_ptr()),
    )
    return token_ids


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    """`vocab_size` where none is left out."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def filtered_weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities, [R, V] float32, 0 for tokens that temperature, `min_p`, `top_k` and `top_p`,
    in this order, leave out; what is left is not made to add up to 1 again. `logits` [R, V] float32
    with finite maxima; they are overwritten.
    """
    if any(p.temperature != 1.0 for p in params):
        # From the maximum on, which no temperature, however small, lifts beyond all numbers.
        logits -= logits.amax(dim=1, keepdim=True)
        logits /= _column([p.temperature for p in params], logits)
    weights = logits.softmax(dim=1)
    if any(p.min_p > 0 for p in params):
        shares = _column([p.min_p for p in params], logits)
        weights *= weights >= shares * weights.amax(dim=1, keepdim=True)
    _keep_top_k(weights, [_top_k(p, logits.shape[1]) for p in params])
    narrowed = [i for i, p in enumerate(params) if p.top_p < 1]
    if narrowed:
        rows = on_device(narrowed, logits)
        shares = _column([params[i].top_p for i in narrowed], logits, torch.float64)
        own = weights[rows]
        is_likely = own >= TOP_P_SHARE * own.amax(dim=1, keepdim=True)
        num_likely = int(is_likely.sum(dim=1).max())
        weights[rows] = keep_top_p(own, shares, max(MIN_TOP_P_CANDIDATES, num_likely + 1))
    return weights


def _column(
    values: list[float], like: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[R, 1]"""
    return on_device(values, like, dtype)[:, None]


def _keep_top_k(weights: torch.Tensor, limits: list[int]) -> None:
    """Zero all but each row's largest, in place; those equal to the last one kept stay too."""
    by_limit = {k: [i for i, own in enumerate(limits) if own == k] for k in set(limits)}
    by_limit.pop(weights.shape[1], None)
    for limit, places in by_limit.items():
        rows = torch.tensor(places, device=weights.device)
        chosen = weights[rows]
        smallest = chosen.topk(limit, dim=1).values[:, -1:]
        weights[rows] = chosen * (chosen >= smallest)


def keep_top_p(weights: torch.Tensor, shares: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """`weights` [R, V], zero for all but the smallest set of likeliest tokens that holds at least
    the row's share of the mass; among equal ones the lower id goes first. The likeliest always
    stays. `shares` [R, 1] float64.
    """
    targets = shares * weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    kept = torch.zeros_like(weights)
    largest, token_ids = weights.topk(min(num_candidates, weights.shape[1]), dim=1)
    smallest = largest[:, -1:]
    # Enough when the set ends before the last candidates: which of several equal ones at that
    # border are candidates is chance.
    above = (largest * (largest > smallest)).sum(dim=1, keepdim=True, dtype=torch.float64)
    is_enough = ((above >= targets) | (smallest == 0))[:, 0]
    for rows, ids in (
        (is_enough.nonzero()[:, 0], token_ids.sort(dim=1).values),
        ((~is_enough).nonzero()[:, 0], None),
    ):
        if len(rows):
            own = weights[rows]
            kept[rows] = _cut(own, targets[rows], None if ids is None else ids[rows])
    return kept


def _cut(
    weights: torch.Tensor, targets: torch.Tensor, token_ids: torch.Tensor | None
) -> torch.Tensor:
    """[R, V] with only the likeliest tokens that together reach `targets` [R, 1] float64, out of
    `token_ids` [R, C], ascending (None: of all).
    """
    values = weights if token_ids is None else weights.gather(1, token_ids)
    ordered, order = values.sort(dim=1, descending=True, stable=True)
    precise = ordered.double()
    is_kept = precise.cumsum(dim=1) - precise < targets
    is_kept[:, 0] = True
    ids = order if token_ids is None else token_ids.gather(1, order)
    return torch.zeros_like(weights).scatter_(1, ids, ordered * is_kept)


def uniform(seed: int, output_index: int) -> float:
    """The one number in [0, 1) that decides output `output_index` of a request with this seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=output_index)).random())


def uniforms(seeds: Sequence[int], output_indices: Sequence[int]) -> Doubles:
    """`uniform` of many, [n]."""
    library = native.library()
    if library is None:
        return np.array([uniform(*pair) for pair in zip(seeds, output_indices, strict=True)])
    keys, indices = np.array(seeds, np.uint64), np.array(output_indices, np.int64)
    found = np.empty(len(keys))
    library.uniform(
        native.arguments(torch.float32),
        *(keys.ctypes.data, indices.ctypes.data, len(keys), found.ctypes.data),
    )
    return found


def draw(weights: torch.Tensor, numbers: Sequence[float] | Doubles) -> torch.Tensor:
    """[R] int64: the token whose stretch of the cumulated `weights` [R, V] holds the number. No
    token of weight 0 is drawn.
    """
    num_rows, num_tokens = weights.shape
    size = min(DRAW_BLOCK, num_tokens)
    num_blocks = num_tokens // size
    # The last block takes what is left over.
    whole = weights[:, : num_blocks * size].view(num_rows, num_blocks, size)
    # So few in single precision; a sum in double of single values is many times slower on a CPU.
    block_sums = whole.sum(dim=2).double()
    block_sums[:, -1] += weights[:, num_blocks * size :].sum(dim=1, dtype=torch.float64)
    ends = block_sums.cumsum(dim=1)
    total = ends[:, -1:]
    drawn = _column(list(numbers), weights, torch.float64) * total
    # Rounding could lift the product to the total itself, beyond the last token.
    targets = torch.minimum(drawn, total.nextafter(torch.zeros_like(total)))
    blocks = torch.searchsorted(ends, targets, right=True)
    before = (ends.gather(1, (blocks - 1).clamp(min=0))).masked_fill_(blocks == 0, 0.0)
    first = blocks * size
    columns = first + torch.arange(size + num_tokens % size, device=weights.device)
    own = weights.gather(1, columns.clamp(max=num_tokens - 1)).double()
    own[(columns >= num_tokens) | (columns - first >= size) & (blocks < num_blocks - 1)] = 0
    sums = own.cumsum(dim=1)
    # Sums in another order round otherwise: never beyond the block's last token.
    last = sums[:, -1:]
    within = torch.minimum(targets - before, last.nextafter(torch.zeros_like(last)))
    return (first + torch.searchsorted(sums, within, right=True))[:, 0]
