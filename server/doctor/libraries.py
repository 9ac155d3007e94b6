"""torch, NCCL and deep_ep, loaded in a process of its own: one that dies or hangs while it loads
them is a finding, and not the doctor's end.
"""

import subprocess
import sys

import msgspec

from moed.config.machine import is_installed
from moed.dist.deep_ep.loading import Unavailable, find_deep_ep

LOADING_S = 120.0
"""torch on a cold disk takes long."""


class Libraries(msgspec.Struct, frozen=True):
    """What was found."""

    torch: str
    cuda: str | None
    """That torch was built for; None: a build for CPUs."""
    num_gpus: int
    """That CUDA can use."""
    gpu_fault: str | None
    """Why it can use none, although torch was built for them."""
    nccl: str | None
    deep_ep: str | None
    """Why it cannot be used; empty: it can; None: it is not installed."""
    has_elastic_buffer: bool


def load_libraries() -> Libraries | str:
    """What was found, or what went wrong."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", "moed.server.doctor.libraries"],
            capture_output=True,
            text=True,
            timeout=LOADING_S,
        )
    except subprocess.TimeoutExpired:
        return f"torch did not load within {LOADING_S:g} s"
    except OSError as error:
        return f"no process could be started: {error}"
    try:
        return msgspec.json.decode(run.stdout.splitlines()[-1], type=Libraries)
    except (IndexError, msgspec.DecodeError):
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return f"torch cannot be loaded (exit code {run.returncode}): {last}"


def look() -> Libraries:
    """In the other process."""
    import torch

    fault, num_gpus, nccl = None, 0, None
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            num_gpus = torch.cuda.device_count()
        except Exception as error:
            fault = (str(error).splitlines() or [type(error).__name__])[0]
        if torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    deep_ep, has_elastic_buffer = None, False
    if is_installed("deep_ep"):
        found = find_deep_ep()
        deep_ep = found.reason if isinstance(found, Unavailable) else ""
        has_elastic_buffer = not isinstance(found, Unavailable) and found.has_elastic_buffer
    return Libraries(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        num_gpus=num_gpus,
        gpu_fault=fault,
        nccl=nccl,
        deep_ep=deep_ep,
        has_elastic_buffer=has_elastic_buffer,
    )


if __name__ == "__main__":
    sys.stdout.write("\n" + msgspec.json.encode(look()).decode() + "\n")
