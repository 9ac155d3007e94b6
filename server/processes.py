"""What all launchers need: processes of their own, and signals as something to wait for."""

import logging
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FrameType

logger = logging.getLogger(__name__)


def spawn(
    context: SpawnContext, name: str, target: object, arguments: tuple[object, ...]
) -> SpawnProcess:
    """A process of ours, started and told of in the log."""
    process = context.Process(name=name, target=target, args=arguments)  # type: ignore[arg-type]
    process.start()
    logger.info("started %s: process %d", name.removeprefix("moed-"), process.pid)
    return process


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP, taken from `install` on."""

    def __init__(self, context: SpawnContext) -> None:
        self.numbers: list[int] = []
        """Those that have come."""
        # They only write a byte here, so that whoever waits wakes up and decides.
        self.reader: Connection
        self.reader, self._writer = context.Pipe(duplex=False)

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        self._writer.send_bytes(b"!")

    def clear(self, ready: Sequence[object]) -> None:
        """What has been waited for successfully."""
        if self.reader in ready:
            self.reader.recv_bytes()
