"""What all sections are given: the device, the sizes, and one process that is a whole group.

torch comes in where it is needed, not when the command line is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moed.config.engine_config import EngineConfig
    from moed.dist.groups import Groups


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where, and how large."""

    device: str
    """"cuda" or "cpu"."""
    tiny: bool

    def arguments(self) -> list[str]:
        """For the process of a section."""
        return ["--device", self.device, *(["--tiny"] if self.tiny else [])]

    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def description(self) -> str:
        """The machine, in a line."""
        import torch

        if self.device == "cpu":
            return f"CPU ({platform.machine()}), torch {torch.__version__}"
        found = torch.cuda.get_device_properties(0)
        return (
            f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability "
            f"{found.major}.{found.minor}, torch {torch.__version__}"
        )

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of what is served: triton's interpreter multiplies no 16 bits."""
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def packages(self) -> frozenset[str]:
        """Those of the optional ones that are installed."""
        from moed.config.machine import installed_packages

        return installed_packages()

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def median_s(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one of several calls, after two that are not counted."""
        for _ in range(2):
            call()
        times = []
        for _ in range(repeats):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]

    def config(self, folder: Path, **changes: str) -> EngineConfig:
        """What `resolve()` would return for a checkpoint on this device; `attention_backend` may be
        among `changes`.
        """
        from tests.moe.harness import engine_config

        attention = changes.pop("attention_backend", "sdpa")
        config = engine_config(folder, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, device=self.device),
            runner=dataclasses.replace(config.runner, attention_backend=attention),
        )


@contextlib.contextmanager
def one_process(config: EngineConfig) -> Iterator[Groups]:
    """Real communicators, NCCL's on a GPU, of a group of one."""
    from moed.dist.groups import init_groups
    from moed.dist.launch import LaunchEnvironment
    from moed.dist.rendezvous import open_store

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        environment = LaunchEnvironment(0, 1, 0, 1, "127.0.0.1", port, "moed")
        store = open_store(environment, listener.detach(), config.parallel.distributed_timeout_s)
    groups = init_groups(environment, config.parallel, store, None)
    try:
        yield groups
    finally:
        groups.close()
