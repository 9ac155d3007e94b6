"""At start: known rows through dispatch and combine, compared with a result computed locally.

A backend that loses, swaps or doubles rows would serve wrong text with a straight face; it is
refused here instead, naming rank and row.
"""

import torch

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import All2AllBackend, Dispatched
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.placement import SlotMap

MAX_ROWS = 7
# Relative: one rounding of the result, and of the partial sums on their way.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def check_backend(
    backend: All2AllBackend, groups: Groups, config: EngineConfig, placement: ExpertPlacement
) -> None:
    """Collective. Raises `MoedError` naming the rank and its first wrong row."""
    fused_moe = config.fused_moe
    # Ragged, and the last rank sends nothing.
    sizes = [
        min(2 + 3 * rank, MAX_ROWS, fused_moe.dispatch_capacity)
        for rank in range(groups.world_size)
    ]
    if groups.world_size > 1:
        sizes[-1] = 0
    num_rows, top_k = sizes[groups.rank], fused_moe.top_k
    device = torch.device(groups.device_type)
    dtype = getattr(torch, config.model.dtype)
    rows = torch.arange(num_rows, device=device)[:, None]
    columns = torch.arange(fused_moe.hidden_size, device=device)[None]
    hidden = ((rows * 31 + columns * 7 + groups.rank * 13) % 17 - 8).to(dtype) / 8
    topk_ids = spread_ids(num_rows, groups.rank, top_k, fused_moe.num_experts).to(device)
    choices = torch.arange(top_k, device=device)[None]
    topk_weights = ((choices + 1) / (top_k + rows % 3)).float()
    metadata = DPMetadata(torch.tensor(sizes, dtype=torch.int32), groups.rank, step_id=-1)
    slot_ids = SlotMap(placement, groups.rank, device).to_slots(topk_ids)
    dispatched = backend.dispatch(hidden, slot_ids, topk_weights, metadata)
    combined = backend.combine(
        _scaled(dispatched, _factors(placement, groups.rank, device)), dispatched
    )
    factor = (topk_weights * (topk_ids + 1)).sum(dim=1, keepdim=True)
    expected = hidden.float() * factor
    _compare(combined, expected, dtype, groups.rank, backend.capabilities.name)


def spread_ids(num_rows: int, rank: int, top_k: int, num_experts: int) -> torch.Tensor:
    """[num_rows, top_k] int64: different experts in each row, spread so far that every rank which
    holds some is sent some.
    """
    step = num_experts // top_k
    rows = torch.arange(num_rows)[:, None]
    first = -(-rows * step // max(num_rows, 1))  # rounded up
    return (first + rank + torch.arange(top_k)[None] * step) % num_experts


def _factors(placement: ExpertPlacement, rank: int, device: torch.device) -> torch.Tensor:
    """[e] float32, by slot: the expert's id + 1, or this rank's share of that; 0 in empty slots."""
    factors = torch.zeros(placement.num_local_slots, device=device)
    held = placement.local_expert_ids(rank)
    factors[: len(held)] = torch.tensor([expert + 1.0 for expert in held], device=device)
    return factors / (placement.num_ranks if placement.is_sharded else 1)


def _scaled(dispatched: Dispatched, factors: torch.Tensor) -> torch.Tensor:
    """What experts would give that multiply by their `factors`; weighted and summed, unless the
    backend's combine does both.
    """
    if dispatched.num_rows_per_expert is not None:
        return (dispatched.hidden.float() * factors[:, None, None]).to(dispatched.hidden.dtype)
    assert dispatched.expert_ids is not None and dispatched.expert_weights is not None
    ids = dispatched.expert_ids
    # One more entry, 0, for choices that live elsewhere (id -1 is the last).
    known = torch.cat([factors, factors.new_zeros(1)])[ids]
    total = (dispatched.expert_weights * known).sum(dim=1, keepdim=True)
    return (dispatched.hidden.float() * total).to(dispatched.hidden.dtype)


def _compare(
    combined: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, rank: int, name: str
) -> None:
    if combined.shape != expected.shape:
        raise MoedError(
            f"backend {name} is broken here: rank {rank} sent {tuple(expected.shape)} and got "
            f"{tuple(combined.shape)} back; choose another with --all2all-backend"
        )
    bound = TOLERANCE[dtype] * expected.abs().clamp(min=1.0)
    is_wrong = ((combined.float() - expected).abs() > bound).any(dim=1)
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0])
        raise MoedError(
            f"backend {name} is broken here: rank {rank}, row {row} came back as "
            f"{combined[row, :4].tolist()}, not {expected[row, :4].tolist()} (first four values); "
            "choose another with --all2all-backend"
        )
