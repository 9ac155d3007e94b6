"""Which experts a token goes to, and with which weights.

Legend: n tokens, D hidden, E experts, K top-k, g groups.
"""

import ctypes
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F

from moed.moe import native
from moed.moe.native.binding import Library, RouterLayer, arguments
from moed.moe.native.matrix import NativeMatrix
from moed.moe.native.packing import can_pack


class Scoring(StrEnum):
    """From logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SPARSE_MIXER = "sparse mixer"
    """One choice after the other, each with a softmax over those that come near it."""


@dataclass(frozen=True)
class RouterSpec:
    """A family's way of choosing."""

    top_k: int
    renormalize: bool
    """The K weights are made to sum to 1: for a softmax, the same as one over the K largest
    logits.
    """
    scoring: Scoring = Scoring.SOFTMAX
    scale: float = 1.0
    """Of the weights, in the end."""
    num_groups: int = 1
    """g groups of neighbouring experts; only the best `num_chosen_groups` are chosen from."""
    num_chosen_groups: int = 1
    best_of_group: int = 2
    """A group is as good as so many of its best experts together."""
    least_sum: float = 0.0
    """What renormalising divides by at least."""
    is_float32: bool = False
    """Logits are computed in float32, whatever the model's dtype, with weights that are held so:
    16 bits would make equals of experts that are not.
    """
    weighs_input: bool = False
    """The weights scale what goes into the experts, not what comes out."""
    jitter: float = 0.0
    """Of the sparse mixer: how near is near, by half the distance in parts of the logit."""


def route(
    logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [n, K] float32 and ids [n, K] int64 for `logits` [n, E].

    `correction` [E] is added to the scores for the choice alone: weights are of the scores without
    it. Of equal experts the one with the lower id comes first.
    """
    logits = logits.float()
    if spec.scoring is Scoring.SPARSE_MIXER:
        return _sparse_mixer(logits, spec)
    is_softmax = spec.scoring is Scoring.SOFTMAX
    scores = torch.softmax(logits, dim=-1) if is_softmax else logits.sigmoid()
    # A sigmoid may round large logits to one and the same score.
    choice = scores if is_softmax else logits
    if correction is not None:
        choice = scores + correction
    if spec.num_groups > spec.num_chosen_groups:
        choice = _of_best_groups(choice, spec)
    # A stable sort, since `topk` promises no order between equals.
    ordered, ids = torch.sort(choice, dim=-1, descending=True, stable=True)
    ids = ids[:, : spec.top_k]
    weights = ordered[:, : spec.top_k] if choice is scores else scores.gather(1, ids)
    if spec.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total.clamp(min=spec.least_sum) if spec.least_sum else total)
    if spec.scale != 1.0:
        weights = weights * spec.scale
    return weights.contiguous(), ids.contiguous()


def _sparse_mixer(logits: torch.Tensor, spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """See `route`. Weights need not sum to 1: https://arxiv.org/abs/2409.12136"""
    left, weights, ids = logits, [], []
    for _ in range(spec.top_k):
        best, chosen = left.max(dim=-1, keepdim=True)
        # By the logits of all experts, also those chosen before, as the model was trained.
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * spec.jitter
        near = torch.softmax(left.masked_fill(is_far, -torch.inf), dim=-1)
        weights.append(near.gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(ids, dim=1)


def _of_best_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """[n, E], minus infinity outside the best groups."""
    by_group = choice.view(-1, spec.num_groups, choice.shape[1] // spec.num_groups)
    num_best = min(spec.best_of_group, by_group.shape[-1])
    quality = by_group.topk(num_best, dim=-1).values.sum(dim=-1)
    order = torch.sort(quality, dim=-1, descending=True, stable=True).indices
    is_left_out = torch.ones_like(quality, dtype=torch.bool)
    is_left_out.scatter_(1, order[:, : spec.num_chosen_groups], False)
    return by_group.masked_fill(is_left_out[..., None], float("-inf")).flatten(-2)


class Router:
    """One layer's router."""

    def __init__(
        self,
        weight: torch.Tensor,
        spec: RouterSpec,
        correction: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """`weight` [E, D], in the dtype that logits are computed in; `correction` [E] float32, see
        `route`; `bias` [E], of the logits.
        """
        self.spec = spec
        self.weight, self.correction, self._bias = weight, correction, bias
        library = native.library()
        self._native: NativeRouter | None = None
        if library is not None and correction is None and is_plain(spec) and can_pack(weight):
            self._native = NativeRouter(library, weight, bias, spec)
            # Held once, in the other layout.
            self.weight = weight.new_empty(0)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `route`, for `hidden` [n, D]."""
        hidden = hidden.to(self.weight.dtype)
        if self._native is not None:
            return self._native.route(hidden)
        return route(F.linear(hidden, self.weight, self._bias), self.spec, self.correction)


def is_plain(spec: RouterSpec) -> bool:
    """Whether the K largest of a softmax are chosen, among all experts."""
    is_grouped = spec.num_groups > spec.num_chosen_groups
    return spec.scoring is Scoring.SOFTMAX and not is_grouped and not spec.least_sum


class NativeRouter:
    """The same in one call of the native kernels, where the spec `is_plain`."""

    def __init__(
        self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec
    ) -> None:
        self._matrix = NativeMatrix(library, weight, bias)
        self._function, self._top_k = library.route, spec.top_k
        self._layer = RouterLayer(
            self._matrix.struct, None, 0.0, spec.scale, spec.top_k, spec.renormalize
        )
        self._address = ctypes.addressof(self._layer)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the function `route`, for `hidden` [n, D] in the dtype of the weight."""
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0]
        weights = hidden.new_empty(num_rows, self._top_k, dtype=torch.float32)
        ids = hidden.new_empty(num_rows, self._top_k, dtype=torch.int64)
        self._function(
            arguments(hidden.dtype),
            self._address,
            hidden.data_ptr(),
            num_rows,
            hidden.data_ptr(),
            weights.data_ptr(),
            ids.data_ptr(),
        )
        return weights, ids
