"""The experts of one rank, on rows in the standard format.

Legend: r rows, D hidden, K top-k, e local experts, I intermediate size, p (row, expert) pairs whose
expert lives here.
"""

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
        self._weights = list(zip(gate_up.unbind(), down.unbind(), strict=True))
        self.num_rows = 0

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]: for each row the sum over its choices that live here."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        flat = ids.flatten()
        # Choices of other ranks, id -1, sort first.
        counts = torch.bincount(flat + 1, minlength=len(self._weights) + 1).tolist()
        pairs = torch.argsort(flat, stable=True)[counts[0] :]
        self.num_rows += pairs.shape[0]
        rows = torch.div(pairs, ids.shape[1], rounding_mode="floor")
        inputs, scales = hidden[rows], weights.flatten()[pairs, None]
        # Float32, since a row sums up to K contributions.
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        end = 0
        for (gate_up, down), count in zip(self._weights, counts[1:], strict=True):
            if not count:
                continue
            own = slice(end, end := end + count)
            result = swiglu_expert(inputs[own], gate_up, down).float()
            if apply_weights:
                result = result * scales[own]
            output.index_add_(0, rows[own], result)
        return output.to(hidden.dtype)


def swiglu_expert(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: down(silu(gate(x)) * up(x)) for `hidden` [n, D]."""
    both = F.linear(hidden, gate_up)
    size = both.shape[1] // 2
    return F.linear(F.silu(both[:, :size]) * both[:, size:], down)


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
