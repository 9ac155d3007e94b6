"""The backends keep all of DeepEP's limits and rules: they are driven over the strict stand-in."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from moed.config.capabilities import DeepEPMode
from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, MoedError, PeerLost
from moed.dist.all2all import deepep
from moed.dist.all2all.traffic import Traffic
from moed.dist.deep_ep.loading import DeepEP, Unavailable
from moed.dist.deep_ep.rules import ContractViolation, Mode
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.registry import capabilities, create_backend
from moed.dist.selfcheck import check_backend
from tests.moe.harness import one_rank
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool

NAMES = [name for name, entry in capabilities().items() if entry.deep_ep_mode is not None]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(name: str, num_ranks: int) -> EngineConfig:
    """6 experts, which do not divide over 4 ranks; a hidden size and a dtype that DeepEP knows."""
    config = engine_config(backend=capabilities()[name], ranks=num_ranks, max_num_batched_tokens=9)
    model = dataclasses.replace(
        config.model, dtype="bfloat16", hidden_size=2048, num_experts=6, top_k=3
    )
    return dataclasses.replace(config, model=model)


def check_strictly(groups: Groups, name: str) -> int:
    """Several layers' worth of checks on one buffer; returns the capacity."""
    config, placement = config_of(name, groups.world_size), None
    placement = config.placement()
    with mock.patch.object(deepep, "CPU_MODE", Mode.STRICT):
        backend = create_backend(name, groups, placement, config.fused_moe, torch.bfloat16, CPU)
    for _ in range(3):
        check_backend(backend, groups, config, placement)
    backend.close()
    backend.close()
    return config.fused_moe.dispatch_capacity


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_no_rule_is_broken(workers: Callable[[int], WorkerPool], name: str, num_ranks: int) -> None:
    # Low latency wants ranks x capacity to be a multiple of 4: of 2 ranks each rounds 9 up.
    rounded = 10 if capabilities()[name].received_rows_multiple == 4 and num_ranks == 2 else 9
    assert workers(num_ranks).run(check_strictly, name) == [rounded] * num_ranks


def sent(groups: Groups, name: str) -> Traffic:
    """Of rank 0's three rows and rank 1's none; the first row's last choice is padding."""
    config = config_of(name, groups.world_size)
    num_rows = 3 if groups.rank == 0 else 0
    backend = create_backend(
        name, groups, config.placement(), config.fused_moe, torch.bfloat16, CPU
    )
    # Experts 0..2 lie on rank 0.
    ids = torch.tensor([[0, 1, -1], [2, 3, 4], [5, 4, 3]])[:num_rows]
    hidden = torch.ones(num_rows, config.model.hidden_size, dtype=torch.bfloat16)
    metadata = DPMetadata(torch.tensor([3, 0], dtype=torch.int32), groups.rank, 0)
    dispatched = backend.dispatch(hidden, ids, torch.ones(num_rows, 3), metadata)
    backend.combine(dispatched.hidden, dispatched)
    backend.close()
    return backend.traffic


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_counted_by_where_they_went(
    workers: Callable[[int], WorkerPool], name: str
) -> None:
    first, second = workers(2).run(sent, name)
    by_choice = name == "deepep_low_latency"
    assert first.rows_sent.tolist() == ([2 + 1, 2 + 3] if by_choice else [2, 2])
    assert second.rows_sent.tolist() == [0, 0]
    row_bytes = 2048 * 2
    assert first.combine_row_bytes == row_bytes
    assert first.dispatch_row_bytes == row_bytes + (0 if by_choice else 3 * 12)


@pytest.mark.parametrize("name", NAMES)
def test_a_library_that_cannot_load_is_told_with_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reason = "ImportError: libc10_cuda.so: cannot open shared object file"
    monkeypatch.setattr(deepep, "find_deep_ep", lambda: Unavailable(reason))
    with pytest.raises(ConfigError, match=f"'{name}' is unavailable: {reason}; available are all2"):
        deepep.library_of(name, one_rank(), CUDA)


def test_version_1_has_no_elastic_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DeepEP(pytest, has_elastic_buffer=False)
    monkeypatch.setattr(deepep, "find_deep_ep", lambda: found)
    assert deepep.library_of("deepep_low_latency", one_rank(), CUDA) is pytest
    with pytest.raises(ConfigError, match="older than version 2"):
        deepep.library_of("deepep_v2", one_rank(), CUDA)


def test_a_broken_rule_is_not_a_lost_peer() -> None:
    with pytest.raises(MoedError, match="dispatch broke a rule of DeepEP: too many") as caught:
        with deepep.deep_ep_errors("dispatch"):
            raise ContractViolation("too many")
    assert not isinstance(caught.value, PeerLost)
    with pytest.raises(PeerLost), deepep.deep_ep_errors("dispatch"):
        raise RuntimeError("CPU recv timeout")


def test_every_mode_has_one_backend() -> None:
    assert [capabilities()[name].deep_ep_mode for name in NAMES] == list(DeepEPMode)
