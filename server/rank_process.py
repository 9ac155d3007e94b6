"""The launcher's end of one rank: its process, and the pipe between them."""

import contextlib
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import send_handle

import msgspec

from moed.server.lifecycle import describe_exit
from moed.server.messages import AtDoor, FromRank, Join, PeerGone, RankFailure, ToRank

_from_rank = msgspec.msgpack.Decoder(FromRank)


@dataclass
class Rank:
    """One rank. What it has said is read by `collect`."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    epoch: int
    """That it was started for."""
    failure: RankFailure | None = None
    door: int = -1
    """The epoch at whose door it stands."""
    peer_gone: PeerGone | None = None
    """Of the last collective that failed there, though it is well itself."""
    _reason: str | None = None

    def collect(self) -> None:
        """Take in what the rank has said."""
        try:
            while not self.pipe.closed and self.pipe.poll():
                match _from_rank.decode(self.pipe.recv_bytes()):
                    case RankFailure() as failure:
                        self.failure = failure
                    case AtDoor(_, epoch):
                        self.door = epoch
                    case PeerGone() as gone:
                        self.peer_gone = gone
        except (EOFError, OSError):
            self.pipe.close()

    def tell(self, message: ToRank) -> None:
        """A rank that is gone is noticed by its process."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def let_in(self, message: Join, store_socket: socket.socket) -> None:
        """As `tell`; rank 0 gets the socket with it."""
        self.tell(message)
        if self.rank == 0 and self.process.pid is not None:
            with contextlib.suppress(OSError):
                send_handle(self.pipe, store_socket.fileno(), self.process.pid)

    def end(self, reason: str | None) -> None:
        """Now, whatever it is doing; `reason` is what it reports, if that is not known better."""
        self._reason = reason
        self.process.kill()
        self.process.join()
        self.collect()

    @property
    def has_come_up(self) -> bool:
        """False while its program may still be loading."""
        return self.door >= 0 or self.epoch == 0

    def report(self) -> str:
        """What went wrong, for a person."""
        if self._reason is not None:
            return f"{self._reason}, and was ended"
        if self.failure is None:
            return f"rank {self.rank} ended without a word: {describe_exit(self.process.exitcode)}"
        return f"rank {self.rank} failed: {self.failure.error}"

    @property
    def is_consequence(self) -> bool:
        return self.failure is not None and self.failure.is_consequence
