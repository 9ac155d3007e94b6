"""The one list of backends."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moed.config.capabilities import ActivationFormat
from moed.config.errors import ConfigError
from moed.config.expert_placement import ExpertPlacement
from moed.dist.groups import Groups
from moed.dist.registry import capabilities, create_backend
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool


def test_declarations_stand_under_their_own_names() -> None:
    standard, batched = ActivationFormat.STANDARD, ActivationFormat.BATCHED
    declared = capabilities()
    # In order, with the format and whether the backend's combine applies the router's weights.
    assert [
        (name, backend.activation_format, backend.applies_router_weights)
        for name, backend in declared.items()
    ] == [
        ("local", standard, False),
        ("allgather_reducescatter", standard, False),
        ("all2allv", standard, False),
        ("deepep_low_latency", batched, True),
        ("deepep_high_throughput", standard, False),
        ("deepep_v2", standard, False),
    ]
    for name, backend in declared.items():
        assert backend.name == name and backend.description
        assert backend.requires_expert_parallel == (name != "local")


@pytest.mark.parametrize("module", ["moed.dist.registry", "moed.dist.launch"])
def test_imports_no_torch(module: str) -> None:
    """The launcher and `--help` read the declarations; torch would cost them seconds."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    # The path of this process, so that the child finds the same source.
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
    assert subprocess.run(command, timeout=60).returncode == 0


def create(groups: Groups, name: str, num_placed_on: int) -> str:
    """The backend that was made, or what was said instead."""
    config = engine_config(ranks=groups.world_size)
    placement = ExpertPlacement.linear(config.model.num_experts, num_placed_on)
    try:
        backend = create_backend(
            name, groups, placement, config.fused_moe, torch.float32, torch.device("cpu")
        )
    except ConfigError as error:
        return str(error)
    # On one host fewer collectives may do; that they are as many as declared is tested elsewhere.
    count = backend.capabilities.collectives_per_layer
    assert backend.capabilities == replace(capabilities()[name], collectives_per_layer=count)
    return backend.capabilities.name


@pytest.mark.parametrize("name", ["allgather_reducescatter", "all2allv"])
def test_each_name_makes_its_backend(workers: Callable[[int], WorkerPool], name: str) -> None:
    assert workers(2).run(create, name, 2) == [name, name]


def test_local_is_for_one_rank(workers: Callable[[int], WorkerPool]) -> None:
    assert workers(1).run(create, "local", 1) == ["local"]
    for message in workers(2).run(create, "local", 2):
        assert "local serves one rank, and there are 2: choose all2allv or" in message


@pytest.mark.parametrize("name", ["deepep", "LOCAL", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(
    workers: Callable[[int], WorkerPool], name: str
) -> None:
    (message,) = workers(1).run(create, name, 1)
    assert f"{name!r} is unknown; known are local, allgather_reducescatter, all2allv" in message


def test_experts_must_lie_on_these_ranks(workers: Callable[[int], WorkerPool]) -> None:
    for message in workers(2).run(create, "all2allv", 3):
        assert "placed on 3 ranks, but there are 2" in message
