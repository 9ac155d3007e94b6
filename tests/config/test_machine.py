"""What is read of the machine, from files that the test writes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moed.config import environ, machine


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "odd\n"}, 8),
    ],
)
def test_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert environ.available_cores() == cores


@pytest.mark.parametrize(
    ("device_file", "tool", "visible", "found"),
    [
        (True, None, None, True),
        (False, "/usr/bin/nvidia-smi", None, True),
        (False, None, None, False),
        (True, None, "", False),
        (True, None, "-1", False),
        (True, None, "0,1", True),
    ],
)
def test_nvidia_device(
    device_file: bool,
    tool: str | None,
    visible: str | None,
    found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "nvidia0"
    if device_file:
        path.touch()
    monkeypatch.setattr(machine, "NVIDIA_DEVICE", path)
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (machine.nvidia_device() is not None) is found


@pytest.mark.parametrize(
    ("limit", "available"),
    # The machine has 1000 KiB free; the container uses 200 KiB.
    [(None, 1_024_000), ("max", 1_024_000), ("409600", 204_800), ("100", 0)],
)
def test_memory(
    limit: str | None, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("204800\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_memory_bytes() == available


def test_memory_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "missing")
    assert machine.available_memory_bytes() is None


@pytest.mark.parametrize(
    ("output", "visible", "count", "memory"),
    [
        ("81559\n81559\n", None, 2, 81559 * 2**20),
        ("81559\n40960\n", None, 2, 40960 * 2**20),
        ("81559\n81559\n", "1", 1, 81559 * 2**20),
        ("no devices\n", None, None, None),
        (None, None, None, None),
    ],
)
def test_gpus_as_their_tool_lists_them(
    output: str | None,
    visible: str | None,
    count: int | None,
    memory: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        if output is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, stdout=output)

    monkeypatch.setattr(machine, "nvidia_device", lambda: "/dev/nvidia0")
    monkeypatch.setattr(subprocess, "run", run)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    found = machine.this_machine("auto")
    assert (found.gpus_per_node, found.gpu_memory_bytes) == (count, memory)
    assert (found.num_nodes, found.qp_depth) == (1, "2048")


def test_gpus_are_not_asked_for_on_behalf_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_device", lambda: "/dev/nvidia0")
    monkeypatch.setattr(machine, "_gpus", lambda: pytest.fail("asked"))
    assert machine.this_machine("cpu").gpu_memory_bytes is None
