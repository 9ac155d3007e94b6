"""The experts of one rank, on rows in the standard format.

Legend: r rows, D hidden, K top-k, e local experts, I intermediate size.
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
        self.gate_up = gate_up
        self.down = down
        self.num_rows = 0

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]: for each row the sum over its choices that live here."""
        hidden, ids = dispatched.hidden, dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None
        num_experts, top_k = self.gate_up.shape[0], ids.shape[1]
        # Float32, since a row sums up to K contributions.
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
        start = counts[0]  # choices of other ranks, id -1, sort first
        self.num_rows += flat.shape[0] - start
        for expert, count in enumerate(counts[1:]):
            if not count:
                continue
            pairs = order[start : start + count]
            start += count
            rows = torch.div(pairs, top_k, rounding_mode="floor")
            result = swiglu_expert(hidden[rows], self.gate_up[expert], self.down[expert]).float()
            if apply_weights:
                result = result * weights.flatten()[pairs, None]
            output.index_add_(0, rows, result)
        return output.to(hidden.dtype)


def swiglu_expert(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: down(silu(gate(x)) * up(x)) for `hidden` [n, D]."""
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


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
