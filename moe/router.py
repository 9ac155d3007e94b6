"""Which experts a token goes to, and with which weights.

Legend: n tokens, D hidden, E experts, K top-k.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax, then the K most likely experts: weights [n, K] float32 and ids [n, K] int64.

    With `renormalize` the K weights sum to 1, which is also what a softmax over the K largest
    logits gives (Mixtral). Of equal experts the one with the lower id comes first.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    # A stable sort, since `topk` promises no order between equals.
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, ids = ordered[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), ids.contiguous()


@dataclass
class Router:
    """One layer's router."""

    weight: torch.Tensor
    """[E, D]."""
    top_k: int
    renormalize: bool
    weighs_input: bool
    """The weights scale what goes into the experts, not what comes out; a family's choice."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `route`, for `hidden` [n, D]."""
        return route(F.linear(hidden, self.weight), self.top_k, self.renormalize)
