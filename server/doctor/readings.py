"""What the checks look at, read once: the kernel's files, limits and addresses. No torch.

Files are read below a root folder, so that a test can give others. What cannot be read is None.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

STA_UNSYNC = 0x40  # from linux/timex.h
# struct timex on 64 bits: where `maxerror` and `status` lie, and more than its size.
MAX_ERROR_AT, STATUS_AT, TIMEX_BYTES = 24, 40, 256


@dataclass(frozen=True)
class InfinibandPort:
    """One port, as in /sys/class/infiniband."""

    name: str
    """`mlx5_0/1`."""
    is_active: bool
    link: str
    """"InfiniBand" or "Ethernet" (RoCE)."""


@dataclass(frozen=True)
class Clock:
    """What the kernel knows of its own clock."""

    is_synchronized: bool
    max_error_s: float


@dataclass(frozen=True)
class Readings:
    """Sizes in bytes; limits are None where there is none."""

    driver_version: str | None
    """Of NVIDIA's kernel module."""
    driver_parameters: str
    """The text of /proc/driver/nvidia/params; empty where there is none."""
    modules: frozenset[str]
    """Kernel modules; empty where they cannot be read."""
    num_gpu_devices: int
    infiniband: tuple[InfinibandPort, ...]
    has_verbs: bool
    """/dev/infiniband/uverbs*: a process can open the devices."""
    shm_bytes: int | None
    """/dev/shm, in all; None: there is none, or it cannot be written."""
    memlock_bytes: int | None
    num_files: int | None
    num_files_hard: int | None
    num_processes: int | None
    """The smaller of the user's and the container's limit."""
    transparent_hugepages: str | None
    """"always", "madvise" or "never"."""
    reserved_hugepages_bytes: int
    """Set apart, and free."""
    num_throttled: int
    """Periods in which the container's CPU quota was used up."""
    clock: Clock | None
    addresses: Mapping[str, tuple[str, ...]]
    """By interface."""


def take_readings(root: Path = Path("/")) -> Readings:
    """Of this machine and container, as this process sees them. Never raises."""
    limits = text_of(root / "proc/self/limits")
    meminfo = text_of(root / "proc/meminfo")
    pids = text_of(root / "sys/fs/cgroup/pids.max").strip()
    counts = [limit_of(limits, "Max processes"), int(pids) if pids.isdigit() else None]
    free_pages = number_after(meminfo, r"HugePages_Free:\s+") or 0
    page_bytes = (number_after(meminfo, r"Hugepagesize:\s+") or 0) * 1024
    return Readings(
        driver_version=_driver_version(text_of(root / "proc/driver/nvidia/version")),
        driver_parameters=text_of(root / "proc/driver/nvidia/params"),
        modules=frozenset(
            line.split()[0] for line in text_of(root / "proc/modules").splitlines() if line
        ),
        num_gpu_devices=sum(
            re.fullmatch(r"nvidia\d+", name) is not None for name in names_in(root / "dev")
        ),
        infiniband=_infiniband(root / "sys/class/infiniband"),
        has_verbs=any(n.startswith("uverbs") for n in names_in(root / "dev/infiniband")),
        shm_bytes=_writable_bytes(root / "dev/shm"),
        memlock_bytes=limit_of(limits, "Max locked memory"),
        num_files=limit_of(limits, "Max open files"),
        num_files_hard=limit_of(limits, "Max open files", hard=True),
        num_processes=min((count for count in counts if count is not None), default=None),
        transparent_hugepages=_chosen(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        reserved_hugepages_bytes=free_pages * page_bytes,
        num_throttled=number_after(text_of(root / "sys/fs/cgroup/cpu.stat"), "nr_throttled ") or 0,
        clock=read_clock(),
        addresses={
            name: tuple(entry.address.partition("%")[0] for entry in entries)
            for name, entries in psutil.net_if_addrs().items()
        },
    )


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def number_after(text: str, pattern: str) -> int | None:
    found = re.search(rf"^{pattern}(\d+)", text, re.M)
    return None if found is None else int(found.group(1))


def limit_of(limits: str, name: str, hard: bool = False) -> int | None:
    """From /proc/PID/limits; None: unlimited, or not told."""
    found = re.search(rf"^{name}\s+(\S+)\s+(\S+)", limits, re.M)
    value = "unlimited" if found is None else found.group(2 if hard else 1)
    return int(value) if value.isdigit() else None


def _driver_version(text: str) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return None if found is None else found.group(1)


def _chosen(text: str) -> str | None:
    """The word in brackets: `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return None if found is None else found.group(1)


def _infiniband(folder: Path) -> tuple[InfinibandPort, ...]:
    return tuple(
        InfinibandPort(
            f"{device}/{port}",
            "ACTIVE" in text_of(folder / device / "ports" / port / "state"),
            text_of(folder / device / "ports" / port / "link_layer").strip() or "InfiniBand",
        )
        for device in names_in(folder)
        for port in names_in(folder / device / "ports")
    )


def _writable_bytes(folder: Path) -> int | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    size = os.statvfs(folder)
    return size.f_blocks * size.f_frsize


def read_clock() -> Clock | None:
    """By `adjtimex`, which anyone may ask; None where the kernel does not say."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    state = ctypes.create_string_buffer(TIMEX_BYTES)
    if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
        return None
    status = int.from_bytes(state.raw[STATUS_AT : STATUS_AT + 4], sys.byteorder)
    error_us = int.from_bytes(state.raw[MAX_ERROR_AT : MAX_ERROR_AT + 8], sys.byteorder)
    return Clock(not status & STA_UNSYNC, error_us / 1e6)
