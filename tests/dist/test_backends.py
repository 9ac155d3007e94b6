"""Dispatch and combine against a dense reference: real ranks, ragged and lopsided loads."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import All2AllBackend, Dispatched
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.host.channel import functions
from moed.dist.placement import SlotMap
from moed.dist.registry import create_backend
from tests.dist.counting import COLLECTIVES, counted_collectives
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool

B = 16
D = 5  # odd, so that parts of a row need padding on the wire
K = 3
# `all2allv` twice: between these ranks of one host, and as between hosts.
OVER_GLOO = "all2allv over gloo"
EXCHANGING = ("allgather_reducescatter", "all2allv", OVER_GLOO)
GROUPS = [("local", 1), *((name, size) for name in EXCHANGING for size in (2, 3))]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one rank sends: `hidden` [n, D], `ids` [n, K] int64, `weights` [n, K] float32."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank got."""

    combined: torch.Tensor
    num_received: int
    num_collectives: int
    num_declared: int
    traffic: Traffic


def expert_weight(expert: int) -> torch.Tensor:
    """[D, D] float32, another linear map for each expert."""
    generator = torch.Generator().manual_seed(100 + expert)
    return torch.randn(D, D, generator=generator)


def run_experts(dispatched: Dispatched, expert_ids: tuple[int, ...]) -> torch.Tensor:
    """[r, D]: weighted sums over the local experts, as the layer computes them."""
    assert dispatched.expert_ids is not None and dispatched.expert_weights is not None
    total = torch.zeros(dispatched.hidden.shape)
    for local, expert in enumerate(expert_ids):
        weight = (dispatched.expert_weights * (dispatched.expert_ids == local)).sum(dim=1)
        total += weight[:, None] * (dispatched.hidden.float() @ expert_weight(expert))
    return total.to(dispatched.hidden.dtype)


def make_backend(
    name: str, groups: Groups, placement: ExpertPlacement, top_k: int, dtype: torch.dtype
) -> All2AllBackend:
    fused_moe = FusedMoEConfig(
        num_experts=placement.num_experts,
        top_k=top_k,
        hidden_size=D,
        intermediate_size=8,
        expert_parallel_size=groups.world_size,
        max_num_tokens=B,
    )
    arguments = (groups, placement, fused_moe, dtype, torch.device("cpu"))
    if name != OVER_GLOO:
        return create_backend(name, *arguments)
    with mock.patch.object(groups, "is_single_node", False):
        return create_backend("all2allv", *arguments)


def exchange(groups: Groups, name: str, num_experts: int, rows_by_rank: list[Rows]) -> Answer:
    """On each rank: its rows through dispatch, experts and combine, with checks of the format."""
    rank, rows = groups.rank, rows_by_rank[groups.rank]
    dtype = rows.hidden.dtype
    placement = ExpertPlacement.linear(num_experts, groups.world_size)
    backend = make_backend(name, groups, placement, rows.ids.shape[1], dtype)
    sizes = torch.tensor([len(other.hidden) for other in rows_by_rank], dtype=torch.int32)
    metadata = DPMetadata.make(
        engine_config(ranks=groups.world_size).parallel,
        len(rows.hidden),
        sizes,
        rank=rank,
        step_id=0,
    )
    with counted_collectives() as calls:
        slots = SlotMap(placement, rank, torch.device("cpu")).to_slots(rows.ids)
        dispatched = backend.dispatch(rows.hidden, slots, rows.weights, metadata)
        output = run_experts(dispatched, placement.local_expert_ids(rank))
        combined = backend.combine(output, dispatched)
    num_received = dispatched.hidden.shape[0]
    assert dispatched.hidden.shape == (num_received, D) and dispatched.hidden.dtype == dtype
    ids, weights = dispatched.expert_ids, dispatched.expert_weights
    assert ids is not None and weights is not None
    assert ids.shape == weights.shape == (num_received, rows.ids.shape[1])
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ((ids >= -1) & (ids < placement.num_local(rank))).all()
    assert num_received <= groups.world_size * B
    assert combined.dtype == dtype
    backend.close()
    backend.close()
    declared = backend.capabilities.collectives_per_layer
    return Answer(combined, num_received, len(calls), declared, backend.traffic)


def dense(rows: Rows) -> torch.Tensor:
    """[n, D] float32: one row and one choice after the other."""
    total = torch.zeros(len(rows.hidden), D)
    for row in range(len(rows.hidden)):
        for choice in range(rows.ids.shape[1]):
            expert = int(rows.ids[row, choice])
            if expert >= 0:
                term = rows.hidden[row].float() @ expert_weight(expert)
                total[row] += rows.weights[row, choice] * term
    return total


def random_rows(sizes: list[int], num_experts: int, dtype: torch.dtype) -> list[Rows]:
    generator = torch.Generator().manual_seed(sum(sizes) + num_experts)
    return [
        Rows(
            torch.randn(size, D, generator=generator).to(dtype),
            torch.randint(num_experts, (size, K), generator=generator),
            torch.rand(size, K, generator=generator),
        )
        for size in sizes
    ]


def with_ids(
    rows_by_rank: list[Rows], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[Rows]:
    return [dataclasses.replace(rows, ids=change(rows.ids)) for rows in rows_by_rank]


def pad(ids: torch.Tensor) -> torch.Tensor:
    """Every third choice is padding, and all of the first row."""
    padded = torch.where(torch.arange(ids.numel()).view(ids.shape) % 3 == 1, -1, ids)
    padded[:1] = -1
    return padded


Load = Callable[[int, torch.dtype], tuple[int, list[Rows]]]

# Each gives the number of experts and the rows of each rank. 7 experts lie as 3, 2, 2 on three
# ranks and as 4, 3 on two: expert 0 always on rank 0, expert 6 always on the last.
LOADS: dict[str, Load] = {
    "ragged": lambda n, dtype: (7, random_rows([3, 5, 1][:n], 7, dtype)),
    "full": lambda n, dtype: (7, random_rows([B] * n, 7, dtype)),
    "first_rank_sends_none": lambda n, dtype: (7, random_rows([0, 4, 2][:n], 7, dtype)),
    "only_last_rank_sends": lambda n, dtype: (7, random_rows([0] * (n - 1) + [4], 7, dtype)),
    "first_rank_receives_none": lambda n, dtype: (
        7,
        with_ids(random_rows([3, 5, 1][:n], 7, dtype), lambda ids: 5 + ids % 2),
    ),
    "last_rank_receives_none": lambda n, dtype: (
        7,
        with_ids(random_rows([3, 5, 1][:n], 7, dtype), lambda ids: ids % 3),
    ),
    "all_rows_to_one_expert": lambda n, dtype: (
        7,
        with_ids(random_rows([3, 0, 6][:n], 7, dtype), lambda ids: ids * 0 + 6),
    ),
    "all_empty": lambda n, dtype: (7, random_rows([0] * n, 7, dtype)),
    "same_expert_twice": lambda n, dtype: (
        7,
        with_ids(random_rows([4, 2, 3][:n], 7, dtype), lambda ids: ids[:, [0, 0, 1]]),
    ),
    "padding": lambda n, dtype: (7, with_ids(random_rows([4, 0, 3][:n], 7, dtype), pad)),
    "only_padding": lambda n, dtype: (
        7,
        with_ids(random_rows([2, 3, 0][:n], 7, dtype), lambda ids: ids * 0 - 1),
    ),
    "three_experts": lambda n, dtype: (3, random_rows([2, 4, 3][:n], 3, dtype)),
    "one_expert": lambda n, dtype: (1, random_rows([2, 4, 3][:n], 1, dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("name", "world_size"), GROUPS)
def test_rows_come_home_as_the_dense_sum(
    workers: Callable[[int], WorkerPool],
    name: str,
    world_size: int,
    load: str,
    dtype: torch.dtype,
) -> None:
    num_experts, rows_by_rank = LOADS[load](world_size, dtype)
    answers = workers(world_size).run(exchange, name, num_experts, rows_by_rank)
    # bfloat16 keeps 8 bits; partial sums of up to three ranks and their sum are rounded.
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for rows, answer in zip(rows_by_rank, answers, strict=True):
        assert answer.combined.shape == rows.hidden.shape
        torch.testing.assert_close(
            answer.combined.float(), dense(rows), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(("name", "world_size"), GROUPS)
@pytest.mark.parametrize("size", [0, 1, B])
def test_number_of_collectives_is_as_declared(
    workers: Callable[[int], WorkerPool], name: str, world_size: int, size: int
) -> None:
    """With as many rows on each rank, and on one rank only."""
    assert {"all_to_all_single", "all_gather_single", "all_reduce"} <= set(COLLECTIVES)
    for sizes in ([size] * world_size, [0] * (world_size - 1) + [size]):
        rows_by_rank = random_rows(sizes, 7, torch.float32)
        answers = workers(world_size).run(exchange, name, 7, rows_by_rank)
        for answer in answers:
            assert answer.num_collectives == answer.num_declared
    through_memory = 2 if functions() else 3
    on_one_host = {"local": 0, "allgather_reducescatter": 2, "all2allv": through_memory}
    on_one_host[OVER_GLOO] = 3
    assert answer.num_declared == on_one_host[name]


def test_a_row_travels_once_to_each_rank_that_needs_it(
    workers: Callable[[int], WorkerPool],
) -> None:
    """Experts 0..3 lie on rank 0 and 4..6 on rank 1."""
    rank_0 = torch.tensor([[0, 1, 3], [0, 0, -1], [3, 4, 6]])  # to 0, to 0, to both
    rank_1 = torch.tensor([[5, 6, 4], [-1, -1, -1]])  # to 1, to none
    rows_by_rank = [
        dataclasses.replace(rows, ids=ids)
        for rows, ids in zip(random_rows([3, 2], 7, torch.float32), [rank_0, rank_1], strict=True)
    ]
    answers = workers(2).run(exchange, "all2allv", 7, rows_by_rank)
    assert [answer.num_received for answer in answers] == [3, 2]
    answers = workers(2).run(exchange, "allgather_reducescatter", 7, rows_by_rank)
    assert [answer.num_received for answer in answers] == [5, 5]


@pytest.mark.parametrize("load", ["ragged", "padding", "same_expert_twice", "only_padding"])
@pytest.mark.parametrize(("name", "world_size"), GROUPS)
def test_rows_are_counted_by_where_they_went(
    workers: Callable[[int], WorkerPool], name: str, world_size: int, load: str
) -> None:
    num_experts, rows_by_rank = LOADS[load](world_size, torch.float32)
    placement = ExpertPlacement.linear(num_experts, world_size)
    answers = workers(world_size).run(exchange, name, num_experts, rows_by_rank)
    for rows, answer in zip(rows_by_rank, answers, strict=True):
        needed = [
            sum(any(expert in held for expert in row) for row in rows.ids.tolist())
            for held in map(placement.local_expert_ids, range(world_size))
        ]
        expected = {"local": [0], "allgather_reducescatter": [len(rows.ids)] * world_size}
        assert answer.traffic.rows_sent.tolist() == expected.get(name, needed)
        # D values of 4 bytes and K choices; on the wire each part is padded to 8: 24 + 16 + 16.
        row_bytes = {"local": 0, "all2allv": 20 + K * 12 if functions() else 56}.get(name, 56)
        assert answer.traffic.dispatch_row_bytes == row_bytes
        assert answer.traffic.combine_row_bytes == (0 if name == "local" else 20)


def exchange_unchanged(groups: Groups, name: str) -> bool:
    """Rows that no expert changes come back as the same bits, each in its place."""
    num_experts = 7
    placement = ExpertPlacement.linear(num_experts, groups.world_size)
    backend = make_backend(name, groups, placement, 1, torch.float32)
    sizes = torch.tensor([B - rank for rank in range(groups.world_size)], dtype=torch.int32)
    num_rows = int(sizes[groups.rank])
    metadata = DPMetadata(sizes, groups.rank, 0)
    generator = torch.Generator().manual_seed(groups.rank)
    hidden = torch.randn(num_rows, D, generator=generator)
    # 3 does not divide 7: neighbours go to different experts, so no rank sees own rows in order.
    ids = (torch.arange(num_rows)[:, None] * 3 + groups.rank) % num_experts
    slots = SlotMap(placement, groups.rank, torch.device("cpu")).to_slots(ids)
    dispatched = backend.dispatch(hidden, slots, torch.ones(num_rows, 1), metadata)
    assert dispatched.expert_ids is not None
    is_here = dispatched.expert_ids >= 0
    combined = backend.combine(dispatched.hidden * is_here, dispatched)
    return torch.equal(combined, hidden)


@pytest.mark.parametrize(("name", "world_size"), GROUPS)
def test_own_rows_come_back_in_own_order(
    workers: Callable[[int], WorkerPool], name: str, world_size: int
) -> None:
    assert all(workers(world_size).run(exchange_unchanged, name))


def sum_of_three_ranks(groups: Groups, name: str) -> list[list[float]]:
    """One bfloat16 row on each rank, to three experts that give 256, 1 and 1 on three ranks."""
    placement = ExpertPlacement.linear(3, 3)
    backend = make_backend(name, groups, placement, 3, torch.bfloat16)
    metadata = DPMetadata(torch.ones(3, dtype=torch.int32), groups.rank, 0)
    hidden = torch.ones(1, D, dtype=torch.bfloat16)
    weights = torch.tensor([[256.0, 1.0, 1.0]])
    dispatched = backend.dispatch(hidden, torch.tensor([[0, 1, 2]]), weights, metadata)
    assert dispatched.expert_ids is not None and dispatched.expert_weights is not None
    factor = (dispatched.expert_weights * (dispatched.expert_ids >= 0)).sum(dim=1, keepdim=True)
    combined = backend.combine((dispatched.hidden * factor).to(torch.bfloat16), dispatched)
    values: list[list[float]] = combined.tolist()
    return values


@pytest.mark.parametrize("name", EXCHANGING)
def test_partial_sums_are_added_in_float32(workers: Callable[[int], WorkerPool], name: str) -> None:
    """bfloat16 holds 256 and 258 but not 257: added in bfloat16, 256 + 1 + 1 would stay 256."""
    assert workers(3).run(sum_of_three_ranks, name) == [[[258.0] * D]] * 3
