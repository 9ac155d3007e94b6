"""What every implementation must return, one row and one choice at a time, in float32."""

import torch

from moed.dist.all2all.base import Dispatched


def reference_experts(
    dispatched: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, apply_weights: bool
) -> torch.Tensor:
    """[r, D] float32, for rows in the standard format."""
    assert dispatched.expert_ids is not None and dispatched.expert_weights is not None
    output = torch.zeros(dispatched.hidden.shape, dtype=torch.float32)
    for row, ids in enumerate(dispatched.expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            if expert < 0:
                continue
            result = _one_row(dispatched.hidden[row], gate_up[expert], down[expert])
            weight = dispatched.expert_weights[row, choice] if apply_weights else 1.0
            output[row] += weight * result
    return output


def reference_batched_experts(
    dispatched: Dispatched, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[e, C, D] float32, for rows in the batched format; zero beyond an expert's count."""
    assert dispatched.num_rows_per_expert is not None
    output = torch.zeros(dispatched.hidden.shape, dtype=torch.float32)
    for expert, count in enumerate(dispatched.num_rows_per_expert.tolist()):
        for row in range(count):
            output[expert, row] = _one_row(
                dispatched.hidden[expert, row], gate_up[expert], down[expert]
            )
    return output


def _one_row(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[D] for `hidden` [D], `gate_up` [2I, D] and `down` [D, I]."""
    size = down.shape[-1]
    gate = gate_up[:size].float() @ hidden.float()
    up = gate_up[size:].float() @ hidden.float()
    return down.float() @ (gate * torch.sigmoid(gate) * up)
