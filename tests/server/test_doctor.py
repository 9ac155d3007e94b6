"""`moed doctor`: what it reads from the kernel's files, what it makes of it, and its page.

Machines are made up: readings are given, files lie below a folder of the test.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moed.config.cli import parse
from moed.config.errors import ConfigError, UsageError
from moed.server.doctor import gpu_checks, host_checks, launch_checks
from moed.server.doctor.asked import Asked
from moed.server.doctor.command import as_json, as_text
from moed.server.doctor.finding import Finding, Verdict
from moed.server.doctor.libraries import Libraries, load_libraries
from moed.server.doctor.readings import (
    Clock,
    InfinibandPort,
    Readings,
    read_clock,
    take_readings,
)

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
MIB, GIB = 2**20, 2**30
# A node of 8 GPUs with all that a launch over several nodes wants.
GOOD = Readings(
    driver_version="580.95.05",
    driver_parameters='RegistryDwords: "PeerMappingOverride=1;"\n',
    modules=frozenset({"nvidia", "nvidia_peermem"}),
    num_gpu_devices=8,
    infiniband=(InfinibandPort("mlx5_0/1", True, "InfiniBand"),),
    has_verbs=True,
    shm_bytes=16 * GIB,
    memlock_bytes=None,
    num_files=65536,
    num_files_hard=65536,
    num_processes=None,
    transparent_hugepages="madvise",
    reserved_hugepages_bytes=0,
    num_throttled=0,
    clock=Clock(True, 0.002),
    addresses={"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.7", "fe80::1", "02:fc:00:00:00:01")},
)
WIDE = Asked(8, 2, True, "deepep_low_latency", "0.0.0.0", 8000, 4, None, None)
CPU = Asked(2, 1, False, "all2allv", "127.0.0.1", 8000, 1, GIB, None)
LOADED = Libraries("2.13.0", "13.0", 8, None, "2.30.7", "", True)


def changed(value: Any, **changes: Any) -> Any:
    return dataclasses.replace(value, **changes)


def loaded(**changes: Any) -> Libraries:
    return Libraries(**{name: getattr(LOADED, name) for name in LOADED.__struct_fields__} | changes)


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    # Who is told of a fault is told what to do, and nobody else.
    assert bool(finding.fix) == (finding.verdict is not OK)
    return finding


@pytest.mark.parametrize(
    ("check", "asked", "changes", "verdict", "part"),
    [
        (host_checks.shared_memory, WIDE, {}, OK, "16.0 GiB"),
        (host_checks.shared_memory, WIDE, {"shm_bytes": 64 * MIB}, PROBLEM, "--shm-size 16g"),
        (host_checks.shared_memory, WIDE, {"shm_bytes": 512 * MIB}, WARNING, "--shm-size"),
        (host_checks.shared_memory, CPU, {"shm_bytes": 64 * MIB}, OK, "hardly used"),
        (host_checks.shared_memory, CPU, {"shm_bytes": None}, PROBLEM, "--ipc=host"),
        (host_checks.locked_memory, WIDE, {}, OK, "unlimited"),
        (host_checks.locked_memory, WIDE, {"memlock_bytes": 8 * MIB}, PROBLEM, "memlock=-1"),
        (host_checks.locked_memory, CPU, {"memlock_bytes": 8 * MIB}, OK, "RDMA only"),
        (host_checks.open_files, CPU, {"num_files": 512}, PROBLEM, "ulimit -n 8192"),
        (host_checks.open_files, CPU, {"num_files": 1024}, WARNING, "nofile=65536"),
        (
            host_checks.open_files,
            CPU,
            {"num_files": 1024, "num_files_hard": 1024},
            WARNING,
            "raise the hard limit",
        ),
        (
            host_checks.open_files,
            CPU,
            {"num_files": 1024, "num_files_hard": 4096},
            WARNING,
            "ulimit -n 4096",
        ),
        (host_checks.open_files, CPU, {"num_files": None}, OK, "unlimited"),
        (host_checks.processes, WIDE, {"num_processes": 100}, PROBLEM, "--pids-limit"),
        (host_checks.processes, CPU, {"num_processes": 4096}, OK, "4096"),
        (host_checks.huge_pages, CPU, {}, OK, "madvise"),
        (host_checks.huge_pages, CPU, {"transparent_hugepages": "never"}, WARNING, "echo madvise"),
        (host_checks.huge_pages, WIDE, {"transparent_hugepages": "never"}, OK, "never"),
        (
            host_checks.huge_pages,
            WIDE,
            {"reserved_hugepages_bytes": 2 * GIB},
            WARNING,
            "vm.nr_hugepages=0",
        ),
        (host_checks.clock, CPU, {}, OK, "2 ms"),
        (host_checks.clock, CPU, {"clock": Clock(False, 16.0)}, WARNING, "chrony"),
        (host_checks.clock, CPU, {"clock": Clock(True, 3.0)}, WARNING, "3.0 s"),
        (host_checks.clock, CPU, {"clock": None}, WARNING, "does not say"),
        (gpu_checks.infiniband, CPU, {}, OK, "between nodes only"),
        (
            gpu_checks.infiniband,
            changed(WIDE, backend="all2allv"),
            {"has_verbs": False},
            PROBLEM,
            "--device /dev/infiniband",
        ),
        (
            gpu_checks.infiniband,
            changed(WIDE, backend="all2allv"),
            {"infiniband": ()},
            WARNING,
            "over TCP",
        ),
        (gpu_checks.infiniband, WIDE, {"infiniband": ()}, PROBLEM, "DeepEP needs it"),
        (
            gpu_checks.infiniband,
            changed(WIDE, backend="all2allv"),
            {"infiniband": (InfinibandPort("mlx5_0/1", False, "Ethernet"),)},
            PROBLEM,
            "no port is active: mlx5_0/1",
        ),
        (
            gpu_checks.infiniband,
            changed(WIDE, backend="all2allv"),
            {"infiniband": (*GOOD.infiniband, InfinibandPort("mlx5_1/1", False, "Ethernet"))},
            WARNING,
            "1 of 2 ports active; down: mlx5_1/1",
        ),
    ],
)
def test_what_is_made_of_a_machine(
    check: Callable[[Readings, Asked], Iterator[Finding]],
    asked: Asked,
    changes: dict[str, Any],
    verdict: Verdict,
    part: str,
) -> None:
    finding = only(check(changed(GOOD, **changes), asked))
    assert (finding.verdict, part in finding.found + finding.fix) == (verdict, True), finding


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, OK),
        ({"driver_parameters": 'RegistryDwords: ""\n'}, WARNING),
        ({"driver_parameters": 'RegistryDwords: "PeerMappingOverride=0x1"'}, OK),
        ({"modules": frozenset({"nvidia"})}, WARNING),
        # A container may not see the modules.
        ({"modules": frozenset()}, OK),
    ],
)
def test_gpu_direct(changes: dict[str, Any], verdict: Verdict) -> None:
    first, second = gpu_checks.infiniband(changed(GOOD, **changes), WIDE)
    assert (first.check, first.verdict) == ("InfiniBand", OK)
    assert (second.check, second.verdict) == ("GPUDirect", verdict)


@pytest.mark.parametrize(
    ("changes", "asked", "libraries", "verdict", "part"),
    [
        ({}, WIDE, LOADED, OK, "580.95.05, 8 GPU(s)"),
        ({"driver_version": "570.10"}, WIDE, LOADED, PROBLEM, "needs 580"),
        ({"driver_version": "570.10"}, WIDE, loaded(cuda="12.8"), OK, "570.10"),
        ({"driver_version": "570.10"}, WIDE, None, OK, "570.10"),
        ({"num_gpu_devices": 4}, WIDE, LOADED, PROBLEM, "4 GPU(s) for 8 rank(s)"),
        ({"driver_version": None, "num_gpu_devices": 0}, WIDE, LOADED, PROBLEM, "--gpus all"),
        ({"driver_version": None, "num_gpu_devices": 0}, CPU, LOADED, OK, "for CPUs"),
    ],
)
def test_driver(
    changes: dict[str, Any],
    asked: Asked,
    libraries: Libraries | None,
    verdict: Verdict,
    part: str,
) -> None:
    finding = only(gpu_checks.driver(changed(GOOD, **changes), asked, libraries))
    assert (finding.verdict, part in finding.found + finding.fix) == (verdict, True), finding


@pytest.mark.parametrize(
    ("check", "asked", "libraries", "verdict", "part"),
    [
        (gpu_checks.torch_build, WIDE, LOADED, OK, "CUDA 13.0, 8 GPU(s)"),
        (gpu_checks.torch_build, WIDE, loaded(cuda=None), PROBLEM, "knows no GPUs"),
        (gpu_checks.torch_build, CPU, loaded(cuda=None), OK, "for CPUs"),
        (
            gpu_checks.torch_build,
            WIDE,
            loaded(num_gpus=0, gpu_fault="driver too old"),
            PROBLEM,
            "driver too old",
        ),
        (gpu_checks.torch_build, CPU, "torch cannot be loaded", PROBLEM, "pip install"),
        (gpu_checks.nccl, WIDE, LOADED, OK, "2.30.7"),
        (gpu_checks.nccl, WIDE, loaded(nccl=None), PROBLEM, "torch has none"),
        (gpu_checks.nccl, CPU, loaded(nccl=None), OK, "gloo"),
        (
            gpu_checks.nccl,
            changed(WIDE, backend="deepep_v2"),
            loaded(nccl="2.29.7"),
            PROBLEM,
            "pip install --no-deps nvidia-nccl-cu13==2.30.7",
        ),
        (gpu_checks.nccl, WIDE, loaded(nccl="2.29.7"), OK, "2.29.7"),
        (gpu_checks.deep_ep, WIDE, LOADED, OK, "loads"),
        (gpu_checks.deep_ep, WIDE, loaded(deep_ep=None), PROBLEM, "not installed"),
        (gpu_checks.deep_ep, CPU, loaded(deep_ep=None), OK, "not asked for"),
        (
            gpu_checks.deep_ep,
            WIDE,
            loaded(deep_ep="ImportError: libc10_cuda.so: cannot open shared object file"),
            PROBLEM,
            "install a torch that is built for CUDA",
        ),
        (
            gpu_checks.deep_ep,
            WIDE,
            loaded(deep_ep="ImportError: libnvshmem_host.so.3: cannot open"),
            PROBLEM,
            "nvidia-nvshmem-cu13",
        ),
        (
            gpu_checks.deep_ep,
            changed(WIDE, backend="deepep_v2"),
            loaded(has_elastic_buffer=False),
            PROBLEM,
            "no ElasticBuffer",
        ),
    ],
)
def test_libraries(
    check: Callable[[Asked, Any], Iterator[Finding]],
    asked: Asked,
    libraries: Any,
    verdict: Verdict,
    part: str,
) -> None:
    finding = only(check(asked, libraries))
    assert (finding.verdict, part in finding.found + finding.fix) == (verdict, True), finding


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "num_throttled", "verdict", "part"),
    [
        (3, 1, 0, OK, "3 core(s) for 2 rank(s)"),
        (1, 1, 0, WARNING, "ask for fewer ranks"),
        (4, 4, 0, WARNING, "--num-threads 2"),
        (4, 1, 7, WARNING, "used up in 7 periods"),
    ],
)
def test_processors(
    num_cores: int, num_threads: int, num_throttled: int, verdict: Verdict, part: str
) -> None:
    seen, asked = changed(GOOD, num_throttled=num_throttled), changed(CPU, num_threads=num_threads)
    finding = only(host_checks.processors(seen, asked, num_cores))
    assert (finding.verdict, part in finding.found + finding.fix) == (verdict, True), finding


def test_memory() -> None:
    assert only(host_checks.memory(CPU, 2 * GIB)).verdict is OK
    assert "--memory" in only(host_checks.memory(CPU, GIB // 2)).fix
    assert only(host_checks.memory(WIDE, GIB)).verdict is OK
    assert only(host_checks.memory(CPU, None)).verdict is WARNING


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = only(launch_checks.port(changed(CPU, port=port)))
        assert finding.verdict is PROBLEM and f":{port}" in finding.fix
    assert only(launch_checks.port(changed(CPU, port=port))).verdict is OK
    assert only(launch_checks.port(changed(CPU, port=0))).found == "any free one"


@pytest.mark.parametrize(
    ("asked", "variables", "own_address", "verdict", "part"),
    [
        (CPU, {}, None, OK, "10.0.0.7, 127.0.0.1, ::1"),
        (changed(CPU, host="10.0.0.8"), {}, None, PROBLEM, "one of 10.0.0.7, 127.0.0.1, ::1"),
        (changed(CPU, host="10.0.0.7"), {}, None, OK, "10.0.0.7"),
        (WIDE, {}, "10.0.0.7", OK, "10.0.0.7"),
        (WIDE, {}, "127.0.1.1", WARNING, "/etc/hosts"),
        (WIDE, {}, None, WARNING, "resolves to nothing"),
        (WIDE, {"NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.7", OK, ""),
        (WIDE, {"NCCL_SOCKET_IFNAME": "=ib0"}, "10.0.0.7", PROBLEM, "names ib0"),
    ],
)
def test_addresses(
    asked: Asked, variables: dict[str, str], own_address: str | None, verdict: Verdict, part: str
) -> None:
    finding = only(launch_checks.addresses(GOOD, asked, variables, own_address))
    assert (finding.verdict, part in finding.found + finding.fix) == (verdict, True), finding
    assert "02:fc" not in finding.found + finding.fix and "fe80" not in finding.found


def test_model_folder(tmp_path: Path) -> None:
    asked = changed(CPU, model_folder=tmp_path)
    assert only(launch_checks.model(asked)).verdict is WARNING
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 2048)
    assert only(launch_checks.model(asked)).verdict is OK
    pointer = tmp_path / "more.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    finding = only(launch_checks.model(asked))
    assert finding.verdict is PROBLEM and "lfs pull" in finding.fix
    pointer.unlink()
    pointer.symlink_to(tmp_path / "gone")
    finding = only(launch_checks.model(asked))
    assert finding.verdict is PROBLEM and "more.safetensors" in finding.found


def test_folder_of_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert str(tmp_path) in only(launch_checks.temporary_folder()).found
    deep = tmp_path / ("x" * 100)
    for folder, why in ((tmp_path / "none", "No such file"), (deep, "too long")):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        deep.mkdir(exist_ok=True)
        finding = only(launch_checks.temporary_folder())
        assert finding.verdict is PROBLEM and why in finding.found and "TMPDIR" in finding.fix


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's files, as the kernel writes them."""
    files = {
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max processes             96363                96363                processes \n"
            "Max open files            1024                 4096                 files     \n"
            "Max locked memory         unlimited            unlimited            bytes     \n"
        ),
        "proc/meminfo": "HugePages_Total:    1024\nHugePages_Free:     1024\n"
        "Hugepagesize:       2048 kB\n",
        "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 1 - Live 0x0\n",
        "proc/driver/nvidia/version": (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
            "GCC version:  gcc version 12.2.0\n"
        ),
        "proc/driver/nvidia/params": "ResmanDebugLevel: 4294967295\n",
        "sys/fs/cgroup/pids.max": "512\n",
        "sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 4\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "dev/infiniband/uverbs0": "",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
        "dev/shm/x": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_readings(root: Path) -> None:
    seen = take_readings(root)
    assert seen.driver_version == "580.95.05" and seen.num_gpu_devices == 2
    assert seen.modules == {"nvidia", "nvidia_peermem"}
    assert seen.infiniband == (
        InfinibandPort("mlx5_0/1", True, "Ethernet"),
        InfinibandPort("mlx5_1/1", False, "InfiniBand"),
    )
    assert seen.has_verbs and seen.shm_bytes
    assert (seen.num_files, seen.num_files_hard, seen.memlock_bytes) == (1024, 4096, None)
    # The container's limit is the smaller one.
    assert seen.num_processes == 512
    assert seen.transparent_hugepages == "never" and seen.num_throttled == 4
    # 1024 pages of 2 MiB.
    assert seen.reserved_hugepages_bytes == 2 * GIB


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    seen = take_readings(tmp_path)
    assert (seen.driver_version, seen.shm_bytes, seen.num_files) == (None, None, None)
    assert (seen.infiniband, seen.num_gpu_devices, seen.modules) == ((), 0, frozenset())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_this_machine() -> None:
    import resource

    seen, files = take_readings(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert seen.num_files == (None if files == resource.RLIM_INFINITY else files)
    clock = read_clock()
    assert clock is None or clock.max_error_s >= 0
    found = load_libraries()
    assert isinstance(found, Libraries), found
    assert found.torch == pytest.importorskip("torch").__version__


def test_page_and_json() -> None:
    findings = [
        Finding("driver", OK, "580"),
        Finding("/dev/shm", PROBLEM, "64 MiB " * 30, "--shm-size 16g"),
    ]
    text = as_text(findings)
    assert text.startswith("ok      driver    580\nPROBLEM /dev/shm  64 MiB")
    assert "fix: --shm-size 16g\n" in text and max(map(len, text.splitlines())) <= 110
    assert text.endswith("1 problem(s), 0 warning(s), 1 in order\n")
    entries = json.loads(as_json(findings))
    assert entries[0] == {"check": "driver", "verdict": "ok", "found": "580", "fix": ""}


def test_command_line() -> None:
    command = parse(["doctor", "--json", "-dp", "2", "--nnodes=2"])
    assert command.doctor is not None and command.settings is not None
    assert (command.doctor.json, command.doctor.nnodes, command.doctor.quick) == (True, 2, False)
    assert command.settings.data_parallel_size == 2
    with pytest.raises(UsageError, match="--json takes no value"):
        parse(["doctor", "--json=1"])
    with pytest.raises(ConfigError, match="nodes"):
        parse(["doctor", "--nnodes", "0"])


def run_doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moed.server", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_names_what_is_wrong_and_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = run_doctor("--json", "--quick", "--port", port, "--max-num-seqs", "4096")
    assert run.returncode == 1 and run.stderr == ""
    wrong = {
        entry["check"]: entry for entry in json.loads(run.stdout) if entry["verdict"] == "problem"
    }
    assert port in wrong["port"]["found"]
    assert "4096" in wrong["settings"]["found"]
    assert all(entry["fix"] for entry in wrong.values())


def test_a_model_that_is_not_there_does_not_end_the_page() -> None:
    run = run_doctor("--quick", "--port", "0", os.devnull + "/nowhere")
    assert run.returncode == 1 and "PROBLEM settings" in run.stdout
    assert "nofile" in run.stdout and "Traceback" not in run.stdout + run.stderr
