"""The check at start accepts sound backends and refuses broken ones, by rank and row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import All2AllBackend, Dispatched
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.registry import capabilities, create_backend
from moed.dist.selfcheck import check_backend, spread_ids
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool


def config_of(name: str, world_size: int, dtype: str) -> EngineConfig:
    """4 experts, top 2, 32 values in a row."""
    config = engine_config(backend=capabilities()[name], ranks=world_size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


class Broken:
    """A backend with one `fault`, on the ranks of `faulty` only."""

    def __init__(self, sound: All2AllBackend, fault: str, rank: int, faulty: list[int]) -> None:
        self.capabilities, self.traffic = sound.capabilities, sound.traffic
        self._sound = sound
        self._fault = fault if rank in faulty else "none"

    def dispatch(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, metadata: DPMetadata
    ) -> Dispatched:
        dispatched = self._sound.dispatch(hidden, ids, weights, metadata)
        if dispatched.expert_weights is None or dispatched.expert_ids is None:
            assert self._fault == "none"
            return dispatched
        changes: dict[str, dict[str, Any]] = {
            "forgets_weights": {"expert_weights": torch.ones_like(dispatched.expert_weights)},
            "wrong_experts": {"expert_ids": dispatched.expert_ids.roll(1, dims=1)},
        }
        return dataclasses.replace(dispatched, **changes.get(self._fault, {}))

    def combine(self, output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        if self._fault == "loses_its_part":
            output = torch.zeros_like(output)
        combined = self._sound.combine(output, dispatched)
        if self._fault == "swaps_rows":
            return torch.cat([combined[:2].flip(0), combined[2:]])
        if self._fault == "drops_a_row":
            return combined[1:]
        if self._fault == "doubles_last_row" and len(combined):
            combined[-1] *= 2
        if self._fault == "wrong_last_value":
            combined[:, -1] += 0.5
        return combined

    def close(self) -> None:
        self._sound.close()


def check(
    groups: Groups, name: str, dtype: str, fault: str, faulty: list[int]
) -> tuple[str | None, int | None]:
    """What the check said on this rank, and the exit code that goes with it."""
    config = config_of(name, groups.world_size, dtype)
    placement = ExpertPlacement.linear(config.model.num_experts, groups.world_size)
    device = torch.device("cpu")
    sound = create_backend(name, groups, placement, config.fused_moe, getattr(torch, dtype), device)
    try:
        check_backend(Broken(sound, fault, groups.rank, faulty), groups, config, placement)
    except MoedError as error:
        return str(error), error.exit_code
    return None, None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("local", 1),
        ("allgather_reducescatter", 2),
        ("allgather_reducescatter", 3),
        ("all2allv", 2),
        ("all2allv", 3),
        ("deepep_low_latency", 2),
        ("deepep_low_latency", 3),
        ("deepep_high_throughput", 3),
        ("deepep_v2", 3),
    ],
)
def test_sound_backends_pass(
    workers: Callable[[int], WorkerPool], name: str, world_size: int, dtype: str
) -> None:
    answers = workers(world_size).run(check, name, dtype, "none", [])
    assert answers == [(None, None)] * world_size


# Of three ranks, rank 0 sends 2 rows, rank 1 sends 5, rank 2 none. Experts lie as 0 1, 2, 3.
FAULTS = [
    # (fault, on ranks, who must notice and at which row)
    ("swaps_rows", [0], {0: "row 0"}),
    ("swaps_rows", [1], {1: "row 0"}),
    ("doubles_last_row", [0], {0: "row 1"}),
    ("doubles_last_row", [1], {1: "row 4"}),
    ("wrong_last_value", [1], {1: "row 0"}),
    # Every weight is below 1, or 1 for the second of two choices.
    ("forgets_weights", [0, 1, 2], {0: "row 0", 1: "row 0"}),
    ("wrong_experts", [0, 1, 2], {0: "row 0", 1: "row 0"}),
    ("drops_a_row", [1], {1: "sent (5, 32) and got (4, 32) back"}),
    # Both senders choose experts of every rank, so a rank's lost part is missed by both.
    ("loses_its_part", [0], {0: "row ", 1: "row "}),
    ("loses_its_part", [1], {0: "row ", 1: "row "}),
    ("loses_its_part", [2], {0: "row ", 1: "row "}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["allgather_reducescatter", "all2allv"])
@pytest.mark.parametrize(("fault", "faulty", "noticed"), FAULTS)
def test_broken_backends_are_refused(
    workers: Callable[[int], WorkerPool],
    name: str,
    fault: str,
    faulty: list[int],
    noticed: dict[int, str],
    dtype: str,
) -> None:
    answers = workers(3).run(check, name, dtype, fault, faulty)
    for rank, (message, exit_code) in enumerate(answers):
        if rank not in noticed:
            assert message is None
            continue
        assert message is not None and exit_code == 70
        assert f"backend {name} is broken here: rank {rank}" in message
        assert noticed[rank] in message and "--all2all-backend" in message


@pytest.mark.parametrize("fault", ["swaps_rows", "doubles_last_row", "forgets_weights"])
def test_a_single_rank_is_checked_too(workers: Callable[[int], WorkerPool], fault: str) -> None:
    ((message, _),) = workers(1).run(check, "local", "float32", fault, [0])
    assert message is not None and "backend local is broken here: rank 0, row" in message


# Of N ranks all but the last send: 2, 5, 7, 7, ... rows, or 2 when there is one rank.
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("num_experts", [1, 2, 3, 4, 5, 6, 8, 10, 60, 128])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_every_rank_with_experts_is_sent_rows(num_ranks: int, num_experts: int, top_k: int) -> None:
    top_k = min(top_k, num_experts)
    placement = ExpertPlacement.linear(num_experts, num_ranks)
    reached = set()
    for rank in range(max(1, num_ranks - 1)):
        ids = spread_ids(min(2 + 3 * rank, 7), rank, top_k, num_experts)
        for row in ids.tolist():
            assert len(set(row)) == top_k
            reached |= {rank for rank in range(num_ranks) for e in row if e in placement.held[rank]}
    assert reached == {rank for rank in range(num_ranks) if placement.held[rank]}


def test_no_rows_have_no_ids() -> None:
    assert spread_ids(0, 3, 2, 4).shape == (0, 2)
