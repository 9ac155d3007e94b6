"""What this machine has, found without torch: a GPU, free memory."""

import shutil
from pathlib import Path

from moed.config.environ import environment

NVIDIA_DEVICE = Path("/dev/nvidia0")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


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
