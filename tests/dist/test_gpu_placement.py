"""Each rank's GPU is the one of its local rank, taken before anything else; a fake torch.cuda
stands in for the driver.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from moed.config.errors import ConfigError
from moed.dist import groups as groups_module
from moed.dist.groups import Groups, device_of, init_groups, take_gpu
from moed.dist.launch import LaunchEnvironment
from tests.server.engine.configs import engine_config

# Global rank 5 of 6, on a node that holds ranks 4 and 5.
SECOND_OF_NODE = LaunchEnvironment(5, 6, 1, 2, "127.0.0.1", 1, "torchrun")


class FakeCuda:
    """Notes what is called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
        self.calls: list[str] = []
        self.current = 0
        self._num_gpus = num_gpus
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("device_count", "set_device", "current_device", "is_initialized"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(dist, "init_process_group", self._init_process_group)
        monkeypatch.setattr(dist, "new_group", self._new_group)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
        monkeypatch.setattr(groups_module, "_set_pg_timeout", lambda timeout, group: None)

    def device_count(self) -> int:
        return self._num_gpus

    def set_device(self, device: torch.device) -> None:
        self.current = device.index
        self.calls.append(f"set_device {device}")

    def current_device(self) -> int:
        return self.current

    def is_initialized(self) -> bool:
        return False

    def _init_process_group(self, backend: str, *, device_id: Any, **_: Any) -> None:
        self.calls.append(f"init {backend} on {device_id}")

    def _new_group(self, **arguments: Any) -> str:
        self.calls.append(f"new_group {arguments['backend']}")
        return str(arguments["backend"])


def gpu_config(agreement_backend: str) -> Any:
    parallel = engine_config(ranks=6).parallel
    return dataclasses.replace(parallel, device="cuda", agreement_backend=agreement_backend)


@pytest.mark.parametrize("agreement_backend", ["nccl", "gloo"])
def test_the_gpu_of_the_local_rank_comes_first(
    monkeypatch: pytest.MonkeyPatch, agreement_backend: str
) -> None:
    cuda = FakeCuda(monkeypatch, num_gpus=2)
    groups = init_groups(SECOND_OF_NODE, gpu_config(agreement_backend), HashStore(), None)
    assert cuda.calls == [
        "set_device cuda:1",
        "init cpu:gloo,cuda:nccl on cuda:1",
        f"new_group {agreement_backend}",
    ]
    assert groups.compute_device == torch.device("cuda", 1)
    # The agreement alone has its own communicator; the rows' is the world's.
    assert [str(groups.agreement), str(groups.device)] == [agreement_backend, "world"]


def test_fewer_gpus_than_local_ranks_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, num_gpus=1)
    with pytest.raises(ConfigError, match=r"2 ranks on this node .* torch finds 1 .* at most 1"):
        take_gpu(SECOND_OF_NODE)
    assert cuda.calls == []


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="is built for CPUs; install a build with CUDA"):
        take_gpu(SECOND_OF_NODE)


def test_memory_taken_on_another_gpu_before_is_our_own_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, num_gpus=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError):
        take_gpu(SECOND_OF_NODE)
    assert cuda.calls == []


def test_on_cpus_there_is_one_device() -> None:
    group = cast(dist.ProcessGroup, None)
    groups = Groups(SECOND_OF_NODE, "cpu", group, group, group, None, 1, 1.0)
    assert groups.compute_device == device_of("cpu", 1) == torch.device("cpu")
