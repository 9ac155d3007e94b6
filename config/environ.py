"""The one place that reads and writes `os.environ`, and what else describes the machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TORCHRUN_MARKER = "TORCHELASTIC_RUN_ID"
CGROUP = Path("/sys/fs/cgroup")


def environment() -> Mapping[str, str]:
    """The variables of this process, for settings that come from them."""
    return os.environ


def set_default(name: str, value: str) -> None:
    """Set a variable for libraries that read it at start, unless the user has set it."""
    os.environ.setdefault(name, value)


def let_waiting_threads_sleep() -> None:
    """For torch's OpenMP; call it before torch is imported. By default its threads wait in a loop,
    and where others want the cores too, all of them then wait for one that does not get any.
    """
    set_default("OMP_WAIT_POLICY", "passive")


def hub_token() -> str | None:
    """`HF_TOKEN`, for models of the Hub that are private or gated."""
    return os.environ.get("HF_TOKEN") or None


def client_api_key() -> str | None:
    """`MOED_API_KEY`, for commands that ask a running daemon."""
    return os.environ.get("MOED_API_KEY") or None


@dataclass(frozen=True)
class TorchrunVariables:
    """What torchrun tells each of its workers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    num_restarts_left: int
    """How often the agent may yet start its workers again."""


def read_torchrun_environment() -> TorchrunVariables | None:
    """torchrun's variables, or None when its own marker or any of them is missing or malformed.

    They may have leaked from a parent job: `moed.dist.launch` also looks at the parent process.
    """
    values = os.environ
    if TORCHRUN_MARKER not in values:
        return None
    try:
        return TorchrunVariables(
            rank=int(values["RANK"]),
            world_size=int(values["WORLD_SIZE"]),
            local_rank=int(values["LOCAL_RANK"]),
            local_world_size=int(values["LOCAL_WORLD_SIZE"]),
            master_addr=values["MASTER_ADDR"],
            master_port=int(values["MASTER_PORT"]),
            num_restarts_left=int(values.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            - int(values.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError):
        return None


def available_cores() -> int:
    """Cores that this process may use: its CPU set, and a container's CPU quota, rounded down; at
    least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use (cgroup v2, else v1); None: no limit."""
    for read in (_cpu_quota_v2, _cpu_quota_v1):
        try:
            quota, period = read()
            return int(quota) / int(period) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):
            # No such file, or "max".
            continue
    return None


def _cpu_quota_v2() -> tuple[str, str]:
    quota, period = (CGROUP / "cpu.max").read_text().split()
    return quota, period


def _cpu_quota_v1() -> tuple[str, str]:
    folder = CGROUP / "cpu"
    return (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()


def openai_api_key() -> str | None:
    """The key that OpenAI's own clients send; None where it is unset or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def torchrun_patience_variables() -> tuple[str | None, ...]:
    """The variables that set torchrun's `--shutdown-timeout`, the strongest first."""
    names = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return tuple(os.environ.get(name) or None for name in names)
