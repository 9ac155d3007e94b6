"""Who this process is in its group, and who started it. Imports no torch."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import psutil

from moed.config.environ import read_torchrun_environment

# For ranks that all wait at the door.
REJOIN_S = 5.0


@dataclass(frozen=True)
class LaunchEnvironment:
    """One rank's place in the launch; the same fields whoever the launcher is."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this node; also its GPU."""
    local_world_size: int
    store_host: str
    store_port: int
    """Where the ranks meet: a `TCPStore`."""
    launcher: Literal["moed", "torchrun"]
    num_restarts_left: int = 0
    """How often torchrun may yet start all ranks again, after one has failed."""
    epoch: int = 0
    """How often the group has been formed anew."""
    all_are_here: bool = False
    """The other ranks are known to wait for this one: none still has to start."""

    @property
    def is_single_node(self) -> bool:
        """True when all ranks are on this node."""
        return self.local_world_size == self.world_size

    def patience_s(self, timeout_s: float) -> float:
        """How long the others are waited for, where `timeout_s` is for those that still start."""
        return min(timeout_s, REJOIN_S) if self.all_are_here else timeout_s


def detect_torchrun() -> LaunchEnvironment | None:
    """The environment that torchrun gave this process, or None when torchrun did not start it.

    Variables alone prove nothing: they leak into everything that a torchrun job starts. So the
    parent process must be torchrun's agent too.
    """
    variables = read_torchrun_environment()
    if variables is None or not _parent_is_torchrun():
        return None
    return LaunchEnvironment(
        rank=variables.rank,
        world_size=variables.world_size,
        local_rank=variables.local_rank,
        local_world_size=variables.local_world_size,
        store_host=variables.master_addr,
        store_port=variables.master_port,
        launcher="torchrun",
        num_restarts_left=variables.num_restarts_left,
    )


def _parent_is_torchrun() -> bool:
    try:
        parent = psutil.Process().parent()
        command = [] if parent is None else parent.cmdline()
    except psutil.Error:
        return False
    return _program(command) in ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def _program(command: list[str]) -> str:
    """What a command line runs: the name of a script or binary, or the module after `-m`.

    Only that counts: the arguments behind it may name anything.
    """
    parts = iter(command)
    first = next(parts, "")
    if not PurePath(first).name.lower().startswith("python"):
        return PurePath(first).name
    for part in parts:
        if part in ("-X", "-W"):
            next(parts, "")
        elif part == "-m":
            return next(parts, "")
        elif part == "-c":
            return ""
        elif not part.startswith("-"):
            path = PurePath(part)
            is_in_torch = path.parts[-3:-1] == ("torch", "distributed")
            return f"torch.distributed.{path.stem}" if is_in_torch else path.name
    return ""
