"""The experts of one rank, on rows in the standard format.

Legend: r rows, D hidden, K top-k, e local experts, I intermediate size, p (row, expert) pairs whose
expert lives here.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from moed.config.capabilities import ActivationFormat
from moed.config.errors import ConfigError
from moed.dist.all2all.base import Dispatched


class Experts(Protocol):
    """Computes the local experts of dispatched rows."""

    num_rows: int
    """(row, expert) pairs computed since the start."""

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor: ...


class TorchExperts:
    """Rows sorted by expert, then two matrix products per expert that has rows.

    Cost follows the rows: an expert without rows, and padding, cost nothing.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """`gate_up` [e, 2I, D]: gate rows, then up rows; `down` [e, D, I]."""
        # One tensor per expert, made once instead of sliced in every step.
        self._gate_up, self._down = gate_up.unbind(), down.unbind()
        self.num_rows = 0

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]: for each row the sum over its choices that live here."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        flat = ids.flatten()
        # Choices of other ranks, id -1, sort first.
        counts = torch.bincount(flat + 1, minlength=len(self._down) + 1).tolist()
        pairs = torch.argsort(flat, stable=True)[counts[0] :]
        # Float32, since a row sums up to K contributions.
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if pairs.shape[0]:
            self.num_rows += pairs.shape[0]
            rows = torch.div(pairs, ids.shape[1], rounding_mode="floor")
            results = self._compute(hidden[rows], counts[1:]).float()
            if apply_weights:
                results = results * weights.flatten()[pairs, None]
            output.index_add_(0, rows, results)
        return output.to(hidden.dtype)

    def _compute(self, hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[p, D] for `hidden` [p, D] in the order of experts, of which each has its count."""
        used = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in used]

        def multiply(inputs: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
            parts = zip(inputs.split_with_sizes(sizes), used, strict=True)
            return torch.cat([F.linear(part, weights[expert]) for part, expert in parts])

        # The activation once for all: for one row its call costs as much as the products.
        return multiply(_silu_and_multiply(multiply(hidden, self._gate_up)), self._down)


def swiglu(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for `hidden` [n, D]."""
    return F.linear(_silu_and_multiply(F.linear(hidden, gate_up)), down)


def _silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, I] for [n, 2I]."""
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])


def reference_experts(
    dispatched: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, apply_weights: bool
) -> torch.Tensor:
    """What every implementation must return, [r, D] float32: one row and one choice at a time."""
    assert dispatched.expert_ids is not None and dispatched.expert_weights is not None
    output = torch.zeros(dispatched.hidden.shape, dtype=torch.float32)
    size = down.shape[-1]
    for row, ids in enumerate(dispatched.expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            if expert < 0:
                continue
            hidden = dispatched.hidden[row].float()
            gate = gate_up[expert, :size].float() @ hidden
            up = gate_up[expert, size:].float() @ hidden
            result = down[expert].float() @ (gate * torch.sigmoid(gate) * up)
            weight = dispatched.expert_weights[row, choice] if apply_weights else 1.0
            output[row] += weight * result
    return output


_IMPLEMENTATIONS = {
    (ActivationFormat.STANDARD, "cpu"): TorchExperts,
    (ActivationFormat.STANDARD, "cuda"): TorchExperts,
}


def make_experts(
    activation_format: ActivationFormat,
    device_type: str,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> Experts:
    """The implementation for a format and device. Raises `ConfigError` when there is none."""
    implementation = _IMPLEMENTATIONS.get((activation_format, device_type))
    if implementation is None:
        raise ConfigError(
            f"no experts for the {activation_format} format on {device_type}: choose another "
            "--all2all-backend"
        )
    return implementation(gate_up, down)
