"""What the launcher tells a rank: taken in by a thread, so that a rank which is blocked in a
collective, or sleeps, hears it too.
"""

import contextlib
import logging
import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

import msgspec

from moed.config.errors import PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.server.messages import AtDoor, FromRank, Join, Leave, NewFrontend, ToRank
from moed.server.wire import Wire

if TYPE_CHECKING:
    from moed.dist.groups import Groups
    from moed.server.channel import EngineChannel

logger = logging.getLogger(__name__)

_to_rank = msgspec.msgpack.Decoder(ToRank)


class GroupLeft(PeerLost):
    """The launcher wants this rank at the door of a new group."""


class Holder:
    """What a rank has of its present group."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._groups: Groups | None = None
        self._channel: EngineChannel | None = None

    def hold(self, groups: "Groups") -> None:
        with self._news:
            self._groups = groups

    def hold_channel(self, channel: "EngineChannel") -> None:
        """The one of this epoch, closed with the group."""
        self._channel = channel

    def let_go(self) -> None:
        """Close the channel and leave the group, if there are any: it has been aborted, or stopped
        as a whole.
        """
        with self._news:
            groups, self._groups = self._groups, None
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if groups is not None:
            groups.close()


class Orders(Holder):
    """One rank's end of the launcher's pipe. The rank's main thread calls all but `_listen`."""

    def __init__(self, pipe: Connection, environment: LaunchEnvironment, address: str) -> None:
        """`address`: where the front end listens now."""
        self._pipe = pipe
        self._environment = environment
        super().__init__()
        self._wanted_epoch = environment.epoch
        self._join: tuple[Join, int | None] | None = None
        self._address = address
        self._new_frontend: NewFrontend | None = None
        # Readable once there is news: for those who wait for something else too.
        self.wake_fd, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    # From the launcher ---------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                message = _to_rank.decode(self._pipe.recv_bytes())
                listen_fd = None
                if isinstance(message, Join) and self._environment.rank == 0:
                    listen_fd = recv_handle(self._pipe)
            except (EOFError, OSError):
                return  # the launcher is gone, and this process goes with it
            with self._news:
                groups = self._take(message, listen_fd)
                self._news.notify_all()
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_end, b"!")
            if groups is not None:
                groups.abort()

    def _take(self, message: ToRank, listen_fd: int | None) -> "Groups | None":
        """Returns the group to abort, if there is one."""
        match message:
            case Leave(epoch):
                self._wanted_epoch = max(self._wanted_epoch, epoch)
                return self._groups
            case Join():
                self._join = (message, listen_fd)
            case NewFrontend():
                self._new_frontend, self._address = message, message.address
        return None

    # For the rank --------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """True from the order to leave until the rank has joined again."""
        return self._wanted_epoch > self._environment.epoch

    def check(self) -> None:
        """Raises `GroupLeft` when the group is to be left."""
        if self.is_leaving:
            raise GroupLeft(f"the group is formed anew, as epoch {self._wanted_epoch}")

    def hold(self, groups: "Groups") -> None:
        """Have `groups` aborted when it is to be left: now, if that is known already."""
        super().hold(groups)
        if self.is_leaving:
            groups.abort()

    def abort(self) -> None:
        """Something has failed here: peers get to know, if there is a group."""
        if self._groups is not None:
            self._groups.abort()

    def take_wire(self, wire: Wire) -> Wire:
        """Where the front end listens, for a channel that begins now: `wire` is that of the first
        one, and between nodes there is no other.
        """
        with self._news:
            self._new_frontend = None
            return Wire(self._address) if wire.secret is None else wire

    def take_frontend(self) -> NewFrontend | None:
        """Once, after the front end was replaced."""
        with self._news:
            taken, self._new_frontend = self._new_frontend, None
        return taken

    def clear_wake(self) -> None:
        """What was said has been seen."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)

    def tell(self, message: FromRank) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def await_join(self, environment: LaunchEnvironment) -> tuple[LaunchEnvironment, int | None]:
        """Stand at the door of the newest epoch that is asked for, until all ranks do. Returns this
        rank's new place, and on rank 0 the store's socket.
        """
        told = -1
        with self._news:
            while True:
                if self._wanted_epoch > told and self._wanted_epoch >= environment.epoch:
                    told = self._wanted_epoch
                    self.tell(AtDoor(environment.rank, told))
                if self._join is not None:
                    (join, listen_fd), self._join = self._join, None
                    if join.epoch == self._wanted_epoch:
                        self._environment = replace(
                            environment,
                            epoch=join.epoch,
                            store_port=join.store_port,
                            all_are_here=True,
                        )
                        return self._environment, listen_fd
                    if listen_fd is not None:
                        os.close(listen_fd)
                    continue
                self._news.wait()
