"""What this machine has, found without torch: GPUs, free memory."""

import importlib.util
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moed.config.environ import environment

NVIDIA_DEVICE = Path("/dev/nvidia0")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
GPU_QUERY_TIMEOUT_S = 10.0
QP_DEPTH_VARIABLE = "NVSHMEM_QP_DEPTH"
# Never dependencies: they need a GPU's libraries, and are found at run time.
OPTIONAL_PACKAGES = ("deep_ep", "flashinfer")


@dataclass(frozen=True)
class Machine:
    """What a configuration is held against: this machine, or one that is being planned."""

    gpu: str | None
    """Where an NVIDIA device shows; None: there is none."""
    gpus_per_node: int | None = None
    """None: not known, as every number here."""
    num_nodes: int = 1
    gpu_memory_bytes: int | None = None
    """Of one GPU, in all."""
    available_bytes: int | None = None
    """Memory of the node that is free for new processes."""
    qp_depth: str | None = None
    """`NVSHMEM_QP_DEPTH` as set; None: not set."""
    packages: frozenset[str] | None = None
    """Those of `OPTIONAL_PACKAGES` that are installed."""


def this_machine(device: str) -> Machine:
    """The machine under this process; its GPUs are asked for only where `device` ("auto", "cpu",
    "cuda") may mean them.
    """
    gpu = nvidia_device()
    count, memory = (None, None) if gpu is None or device == "cpu" else _gpus()
    return Machine(
        gpu=gpu,
        gpus_per_node=count,
        gpu_memory_bytes=memory,
        available_bytes=available_memory_bytes(),
        qp_depth=environment().get(QP_DEPTH_VARIABLE) or None,
        packages=installed_packages(),
    )


def installed_packages() -> frozenset[str]:
    """Found, not imported: whether they work shows at the start."""
    return frozenset(filter(is_installed, OPTIONAL_PACKAGES))


def is_installed(name: str) -> bool:
    """Whether a package, which may lie in another (`a.b`), can be found."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _gpus() -> tuple[int | None, int | None]:
    """How many GPUs this process may use, and the memory of the smallest: as far as is known."""
    try:
        run = subprocess.run(
            GPU_QUERY, capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=True
        )
        sizes = [int(line) * 2**20 for line in run.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        sizes = []
    visible = environment().get("CUDA_VISIBLE_DEVICES")
    count = len(sizes) if visible is None else len(visible.split(","))
    return count or None, min(sizes, default=None)


def nvidia_device() -> str | None:
    """Where an NVIDIA device shows, or None; none when `CUDA_VISIBLE_DEVICES` hides all."""
    if environment().get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    if NVIDIA_DEVICE.exists():
        return str(NVIDIA_DEVICE)
    return shutil.which("nvidia-smi")


def available_memory_bytes() -> int | None:
    """Memory free for new processes: the machine's, or less by a container's limit (cgroup v2);
    None where it cannot be read.
    """
    try:
        lines = MEMINFO.read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return None
    available = int(line.split()[1]) * 1024
    try:
        limit, used = (
            (CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))
