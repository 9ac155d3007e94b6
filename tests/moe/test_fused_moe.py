"""The MoE boundary: one dispatch and one combine, weights once, the token budget."""

import dataclasses
import pathlib
import re

import pytest
import torch

from moed.config.engine_config import FusedMoEConfig
from moed.config.errors import TokenBudgetExceeded
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.placement import SlotMap
from moed.dist.registry import capabilities
from moed.dist.tensor_parallel import TensorParallel
from moed.moe.experts import ExpertWeights, TorchExperts, reference_experts
from moed.moe.fused_moe import FusedMoE
from moed.moe.router import Router, RouterSpec, route
from tests.moe.harness import one_rank

HIDDEN, SIZE, NUM_EXPERTS, TOP_K, B = 16, 24, 6, 3, 8
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class OneRank:
    """Experts do the weighting, as with most backends. Notes each call and its rows."""

    def __init__(self) -> None:
        self.capabilities = capabilities()["local"]
        self.traffic = Traffic(torch.zeros(1, dtype=torch.int64), 0, 0)
        self.calls: list[tuple[str, int]] = []

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        self.calls.append(("dispatch", hidden.shape[0]))
        return Dispatched(hidden, topk_ids, topk_weights, None, None)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        self.calls.append(("combine", expert_output.shape[0]))
        return expert_output

    def close(self) -> None: ...


class WeighingRank(OneRank):
    """One row per choice travels, and `combine` weighs and sums them."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = dataclasses.replace(self.capabilities, applies_router_weights=True)

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        self.calls.append(("dispatch", hidden.shape[0]))
        top_k = topk_ids.shape[1]
        # Weights that would show if the experts used them.
        unused = torch.full((topk_ids.numel(), 1), 1000.0)
        rows = hidden.repeat_interleave(top_k, dim=0)
        return Dispatched(rows, topk_ids.view(-1, 1), unused, None, topk_weights)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        weights: torch.Tensor = dispatched.state
        self.calls.append(("combine", weights.shape[0]))
        return (expert_output.view(*weights.shape, -1) * weights[..., None]).sum(dim=1)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)
    gate_up = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN, generator=generator) / 4
    down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE, generator=generator) / 4
    return router, gate_up, down


def layer_on(backend: OneRank, max_num_tokens: int = B) -> FusedMoE:
    router, gate_up, down = tensors()
    config = FusedMoEConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        expert_parallel_size=1,
        max_num_tokens=max_num_tokens,
    )
    groups = one_rank()
    return FusedMoE(
        config,
        Router(router, RouterSpec(TOP_K, renormalize=True)),
        TorchExperts(ExpertWeights.plain(gate_up, down)),
        backend,
        SlotMap(ExpertPlacement.linear(NUM_EXPERTS, 1), 0, torch.device("cpu")),
        TensorParallel(groups),
        None,
    )


def metadata(num_rows: int, rank: int = 0, step_id: int = 1) -> DPMetadata:
    return DPMetadata(torch.full((rank + 1,), num_rows, dtype=torch.int32), rank, step_id)


def rows(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("backend", [OneRank(), WeighingRank()], ids=["experts", "backend"])
def test_router_weights_are_applied_once(backend: OneRank) -> None:
    router, gate_up, down = tensors()
    hidden = rows(5)
    weights, ids = route(hidden @ router.T, RouterSpec(TOP_K, True))
    expected = reference_experts(
        Dispatched(hidden, ids, weights, None, None), gate_up, down, apply_weights=True
    )
    torch.testing.assert_close(layer_on(backend)(hidden, metadata(5)), expected)


@pytest.mark.parametrize("num_rows", [0, 1, B])
def test_one_dispatch_and_one_combine(num_rows: int) -> None:
    backend = OneRank()
    output = layer_on(backend)(rows(num_rows), metadata(num_rows))
    assert output.shape == (num_rows, HIDDEN)
    assert backend.calls == [("dispatch", num_rows), ("combine", num_rows)]


@pytest.mark.parametrize(("budget", "num_rows"), [(B, B + 1), (1, 2)])
def test_too_many_rows_are_refused_before_any_collective(budget: int, num_rows: int) -> None:
    backend = OneRank()
    layer = layer_on(backend, max_num_tokens=budget)
    with pytest.raises(TokenBudgetExceeded) as caught:
        layer(rows(num_rows), metadata(num_rows, rank=3, step_id=41))
    message = str(caught.value)
    for part in ("rank 3", "step 41", f"{num_rows} rows", f"max_num_batched_tokens is {budget}"):
        assert part in message
    assert backend.calls == []


def test_nothing_works_in_pieces() -> None:
    """A step never exceeds B, so no loop over pieces of one exists, nor a name for it."""
    # The second is DeepEP's own name for a setting of its queues, in its stand-in's signatures.
    allowed = re.compile(
        r"get_chunk_sizes_across_dp_rank|num_max_(nvl|rdma)_chunked_(send|recv)_tokens"
    )
    sources = [
        path
        for folder in ("moe", "dist")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "demo" not in path.parts  # it trains, with torch's own `chunk`
    ]
    assert len(sources) > 12
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if "chunk" in allowed.sub("", line).lower()
    ]
    assert found == []
