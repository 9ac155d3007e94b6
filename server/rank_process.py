"""The launcher's end of one rank: its process, and the pipe between them."""

import contextlib
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import send_handle
from typing import Protocol

import msgspec

from moed.server.lifecycle import describe_exit
from moed.server.messages import AtDoor, FromRank, Join, PeerGone, RankFailure, ToRank
from moed.server.node_messages import Joined, RanksReady
from moed.server.watchdog import ask_for_stacks, is_stopped

_from_rank = msgspec.msgpack.Decoder(FromRank)


class AnyRank(Protocol):
    """A rank of this node (`Rank`), or of another one (`moed.server.far_node.FarRank`)."""

    rank: int

    @property
    def failure(self) -> RankFailure | None:
        """Its last words."""

    @property
    def door(self) -> int:
        """The epoch at whose door it stands."""

    @property
    def peer_gone(self) -> PeerGone | None:
        """Of the last collective that failed there, though it is well itself."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""

    @property
    def is_stopped(self) -> bool:
        """By a signal."""

    @property
    def has_come_up(self) -> bool:
        """False while its program may still be loading."""

    @property
    def name(self) -> str:
        """For a person: which process, and where."""

    def end(self, reason: str) -> None:
        """Now, whatever it is doing; `reason` is what it reports."""

    def report(self) -> str:
        """What went wrong, for a person."""


def is_consequence(rank: AnyRank) -> bool:
    """It only lost the others."""
    return rank.failure is not None and rank.failure.is_consequence


@dataclass(eq=False)
class Rank:
    """A rank of this node. What it has said is read by `collect`."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    epoch: int
    """That it was started for."""
    number: int = 0
    """How many processes of this rank there have been before, where that is counted."""
    failure: RankFailure | None = None
    door: int = -1
    peer_gone: PeerGone | None = None
    joined: Joined | None = None
    """Where the front end is, if it has told so."""
    is_ready: bool = False
    _reason: str | None = None

    def collect(self) -> None:
        """Take in what the rank has said."""
        try:
            while not self.pipe.closed and self.pipe.poll():
                self._take(_from_rank.decode(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            self.pipe.close()

    def _take(self, message: FromRank) -> None:
        match message:
            case RankFailure() as failure:
                self.failure = failure
            case AtDoor(_, epoch):
                self.door, self.is_ready = epoch, False
            case PeerGone() as gone:
                self.peer_gone = gone
            case Joined() as joined:
                self.joined = joined
            case RanksReady():
                self.is_ready = True

    def tell(self, message: ToRank) -> None:
        """A rank that is gone is noticed by its process."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def let_in(self, message: Join, store_socket: socket.socket | None) -> None:
        """As `tell`; rank 0 gets the socket with it."""
        self.tell(message)
        if self.rank == 0 and store_socket is not None and self.process.pid is not None:
            with contextlib.suppress(OSError):
                send_handle(self.pipe, store_socket.fileno(), self.process.pid)

    def end(self, reason: str | None) -> None:
        """See `AnyRank.end`; None: it reports what is known."""
        self._reason = reason
        self.process.kill()
        self.process.join()
        self.collect()

    @property
    def exit_code(self) -> int | None:
        return self.process.exitcode

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    @property
    def has_come_up(self) -> bool:
        return self.door >= 0 or self.epoch == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def stacks(self) -> str:
        """Has it write its own to the log; returns what can be seen from here."""
        return ask_for_stacks(self.pid)

    def report(self) -> str:
        return describe_end(f"rank {self.rank}", self._reason, self.failure, self.exit_code)


def describe_end(
    name: str, reason: str | None, failure: RankFailure | None, exit_code: int | None
) -> str:
    """What went wrong with the rank `name`; `reason`: why the launcher has ended it."""
    if reason is not None:
        return f"{reason}, and was ended"
    if failure is None:
        return f"{name} ended without a word: {describe_exit(exit_code)}"
    return f"{name} failed: {failure.error}"
