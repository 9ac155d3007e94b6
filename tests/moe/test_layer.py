"""One MoE layer against a dense reference: every backend, both places of the router's weights, DP
and TP, ragged loads.

Each process holds its share; the reference holds all experts and computes row by row in float64.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import All2AllBackend
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.placement import SlotMap
from moed.dist.registry import capabilities, create_backend
from moed.dist.tensor_parallel import TensorParallel
from moed.moe.experts import ExpertWeights, make_experts
from moed.moe.fused_moe import FusedMoE
from moed.moe.router import Router, RouterSpec, route
from moed.moe.shards import shard_of
from moed.moe.shared_experts import SharedExperts
from tests.dist.counting import counted_collectives
from tests.dist.members import with_members
from tests.worker_pool import WorkerPool

D, INTERMEDIATE, B = 20, 12, 16
# Ten times as much where logits are about 100, whose last bit is 8e-6.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer; `sizes` are the rows of each DP rank, one entry for each step."""

    backend: str
    ranks: int
    members: int
    num_experts: int
    top_k: int
    weighs_input: bool = False
    is_sharded: bool = False
    has_shared: bool = False
    router: str = "random"

    def __str__(self) -> str:
        words = [self.backend, f"{self.ranks}x{self.members}", f"{self.num_experts}/{self.top_k}"]
        flags = ("weighs_input", "is_sharded", "has_shared")
        return "-".join([*words, self.router, *(f for f in flags if getattr(self, f))])


def loads(num_ranks: int) -> list[list[int]]:
    """Rows of each rank, step by step: full, ragged, nobody, one alone, the last one idle."""
    return [
        [B] * num_ranks,
        [(5 * rank + 3) % (B + 1) for rank in range(num_ranks)],
        [0] * num_ranks,
        [0] * (num_ranks - 1) + [7],
        [1] + [0] * (num_ranks - 1),
        [B - rank for rank in range(num_ranks - 1)] + [0] if num_ranks > 1 else [2],
    ]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """All weights of a layer."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SharedExperts


def tensors_of(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (1 / math.sqrt(shape[-1]))

    router = normal(case.num_experts, D) * 3
    if case.router == "ties":
        # Experts come in pairs that no token tells apart.
        router = router[torch.arange(case.num_experts) // 2]
    elif case.router == "one_rank":
        # Rows begin with a 1, so that the first experts win with certainty.
        router[: case.top_k, 0] += 100
    return Tensors(
        router,
        normal(case.num_experts, 2 * INTERMEDIATE, D),
        normal(case.num_experts, D, INTERMEDIATE),
        SharedExperts(normal(2 * INTERMEDIATE, D), normal(D, INTERMEDIATE), normal(1, D)),
    )


def rows_of(rank: int, step: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    rows = torch.randn(num_rows, D, generator=generator)
    rows[:, 0] = 1.0
    return rows


def swiglu(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ row).chunk(2)
    result: torch.Tensor = down.double() @ (gate * torch.sigmoid(gate) * up)
    return result


def dense(case: Case, tensors: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """[n, D] float32: one row and one expert at a time."""
    weights, ids = route(rows @ tensors.router.T, RouterSpec(case.top_k, renormalize=True))
    output = torch.zeros(rows.shape, dtype=torch.float64)
    for index, row in enumerate(rows.double()):
        for weight, expert in zip(weights[index].tolist(), ids[index].tolist(), strict=True):
            inner = row * weight if case.weighs_input else row
            result = swiglu(inner, tensors.gate_up[expert], tensors.down[expert])
            output[index] += result if case.weighs_input else weight * result
        if case.has_shared:
            shared = tensors.shared
            assert shared.gate is not None
            scale = torch.sigmoid(shared.gate.double() @ row)
            output[index] += scale * swiglu(row, shared.gate_up, shared.down)
    return output.float()


def build(case: Case, groups: Groups, tensors: Tensors) -> tuple[FusedMoE, All2AllBackend]:
    """The layer as one process holds it, and its backend."""
    declared = capabilities()[case.backend]
    num_processes = groups.world_size
    make = ExpertPlacement.sharded if case.is_sharded else ExpertPlacement.linear
    placement = make(case.num_experts, num_processes)
    config = FusedMoEConfig(
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden_size=D,
        intermediate_size=INTERMEDIATE,
        expert_parallel_size=num_processes,
        max_num_tokens=B,
        tensor_parallel_size=case.members,
        received_rows_multiple=declared.received_rows_multiple,
    )
    cpu = torch.device("cpu")
    backend = create_backend(case.backend, groups, placement, config, torch.float32, cpu)
    shard = shard_of(INTERMEDIATE, placement, groups.rank)
    own = list(placement.local_expert_ids(groups.rank))
    num_slots = placement.num_local_slots
    gate_up = torch.zeros(num_slots, 2 * shard.size, D)
    down = torch.zeros(num_slots, D, shard.size)
    gate, up = tensors.gate_up[own].chunk(2, dim=1)
    taken = slice(shard.start, shard.stop)
    gate_up[: len(own)] = torch.cat([gate[:, taken], up[:, taken]], dim=1)
    down[: len(own)] = tensors.down[own][:, :, taken]
    layer = FusedMoE(
        config,
        Router(tensors.router, RouterSpec(case.top_k, True, weighs_input=case.weighs_input)),
        make_experts(declared.activation_format, "cpu", ExpertWeights.plain(gate_up, down)),
        backend,
        SlotMap(placement, groups.rank, cpu),
        TensorParallel(groups),
        tensors.shared if case.has_shared else None,
    )
    return layer, backend


def run_layer(groups: Groups, case: Case) -> tuple[list[torch.Tensor], set[int]]:
    """On one process: the results of all steps, and how many collectives each took beyond those
    that the backend declares.
    """
    groups = with_members(groups, case.members)
    layer, backend = build(case, groups, tensors_of(case))
    rank, results, counts = groups.data_parallel_rank, [], set()
    for step, sizes in enumerate(loads(case.ranks)):
        metadata = DPMetadata(torch.tensor(sizes, dtype=torch.int32), rank, step)
        with metadata.sp_local_sizes(case.members), counted_collectives() as calls:
            results.append(layer(rows_of(rank, step, sizes[rank]), metadata))
        counts.add(len(calls) - backend.capabilities.collectives_per_layer)
    backend.close()
    return results, counts


def cases() -> Iterator[Case]:
    exchanging = [name for name, entry in capabilities().items() if entry.requires_expert_parallel]
    yield Case("local", 1, 1, 6, 2, has_shared=True)
    yield Case("local", 1, 1, 5, 1, weighs_input=True)
    for backend in exchanging:
        yield Case(backend, 2, 1, 8, 2)
        yield Case(backend, 3, 1, 7, 3, has_shared=True)  # 7 experts on 3 ranks
        yield Case(backend, 2, 1, 8, 2, router="ties")
        yield Case(backend, 2, 1, 8, 2, router="one_rank")
        yield Case(backend, 2, 1, 6, 1, weighs_input=True)
        yield Case(backend, 1, 2, 8, 2, has_shared=True)
        yield Case(backend, 2, 2, 6, 2)
        yield Case(backend, 2, 2, 5, 1, weighs_input=True, router="one_rank")
    yield Case("allgather_reducescatter", 2, 1, 4, 2, is_sharded=True)
    yield Case("allgather_reducescatter", 1, 3, 4, 2, is_sharded=True, has_shared=True)
    yield Case("allgather_reducescatter", 2, 2, 4, 1, is_sharded=True, weighs_input=True)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_layer_equals_the_dense_reference(
    workers: Callable[[int], WorkerPool], case: Case
) -> None:
    answers = workers(case.ranks * case.members).run(run_layer, case)
    tensors = tensors_of(case)
    # Members join their rows with one collective more.
    for process, (results, counts) in enumerate(answers):
        rank = process // case.members
        assert counts == {int(case.members > 1)}
        for step, sizes in enumerate(loads(case.ranks)):
            wanted = dense(case, tensors, rows_of(rank, step, sizes[rank]))
            tolerance = TOLERANCE * (10 if case.router == "one_rank" else 1)
            torch.testing.assert_close(results[step], wanted, rtol=0, atol=tolerance)


def test_weights_on_the_input_of_several_experts_are_refused() -> None:
    from moed.config.errors import ConfigError
    from tests.moe.harness import one_rank

    case = Case("local", 1, 1, 6, 2, weighs_input=True)
    with pytest.raises(ConfigError, match="goes to 2 experts"):
        build(case, one_rank(), tensors_of(case))
