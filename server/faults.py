"""Faults on demand, for tests: parsed from `EngineConfig.fault_injection`.

`kill:rank=1:step=20` SIGKILL in that step (0 is the one before a rank is ready);
`raise:rank=1:step=5` an exception in it; both in the first epoch only, as `stop:rank=1:step=9`
SIGSTOP and `hang:rank=1:step=9`, which never ends that step. `kill_with:rank=1:prompt=137` SIGKILL
in every step, of every epoch, that has a request of so many prompt tokens.
`fail_load:rank=1` loading fails; `kv_blocks:rank=1:blocks=48` that many KV blocks on that rank.
Several are joined by `;`.
"""

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moed.config.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

HANG_S = 1e6
ARGUMENTS = {
    "kill": ("rank", "step"),
    "raise": ("rank", "step"),
    "kill_with": ("rank", "prompt"),
    "stop": ("rank", "step"),
    "hang": ("rank", "step"),
    "fail_load": ("rank",),
    "kv_blocks": ("rank", "blocks"),
}


@dataclass(frozen=True)
class Fault:
    """One fault, as written."""

    text: str
    kind: str
    arguments: Mapping[str, int]


class Faults:
    """The faults of one rank; does nothing when there are none."""

    def __init__(self, text: str | None, rank: int, epoch: int) -> None:
        """Raises `ConfigError` for what cannot be parsed."""
        self._epoch = epoch
        every = [_parse(part.strip()) for part in (text or "").split(";") if part.strip()]
        self._own = [fault for fault in every if fault.arguments["rank"] == rank]
        for fault in self._own:
            logger.warning("fault injection is on: %s", fault.text)

    def on_load(self) -> None:
        """Raises `ModelError` when loading is to fail."""
        for fault in self._of("fail_load"):
            raise ModelError(f"injected fault {fault.text}: the model could not be loaded")

    def on_rejoin(self) -> None:
        """The group is another one."""
        self._epoch += 1

    def on_step(self, step_id: int) -> None:
        """Ends the process, or raises `RuntimeError`, in the step that was named."""
        if self._epoch:
            return
        for fault in self._of("raise"):
            if fault.arguments["step"] == step_id:
                raise RuntimeError(f"injected fault {fault.text}")
        for kind, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            for fault in self._of(kind):
                if fault.arguments["step"] == step_id:
                    os.kill(os.getpid(), number)
        for fault in self._of("hang"):
            if fault.arguments["step"] == step_id:
                time.sleep(HANG_S)

    def on_requests(self, prompt_lengths: Iterable[int]) -> None:
        """Ends the process where a prompt of that length is to be run."""
        deadly = {fault.arguments["prompt"] for fault in self._of("kill_with")}
        if deadly and not deadly.isdisjoint(prompt_lengths):
            os.kill(os.getpid(), signal.SIGKILL)

    def kv_blocks(self, num_blocks: int) -> int:
        """This rank's own number of KV blocks, before ranks agree."""
        for fault in self._of("kv_blocks"):
            num_blocks = fault.arguments["blocks"]
        return num_blocks

    def _of(self, kind: str) -> list[Fault]:
        return [fault for fault in self._own if fault.kind == kind]


def _parse(text: str) -> Fault:
    kind, *pairs = text.split(":")
    allowed = ARGUMENTS.get(kind)
    given = dict(pair.partition("=")[::2] for pair in pairs)
    if allowed is None or tuple(given) != allowed or not all(v.isdecimal() for v in given.values()):
        shapes = ", ".join(
            ":".join([name, *(f"{key}=N" for key in keys)]) for name, keys in ARGUMENTS.items()
        )
        raise ConfigError(f"fault injection {text!r} is not understood; known are {shapes}")
    return Fault(text, kind, {key: int(value) for key, value in given.items()})
