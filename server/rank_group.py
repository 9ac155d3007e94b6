"""All ranks of one launch: started together, and formed anew after the loss of one.

A new group has a new epoch. Where ranks outlive it, each gives up the old group and comes to the
door, and those that were lost are started again; when all are there they are let in. A loss on the
way begins another epoch. Otherwise all ranks start again.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess

from moed.config.engine_config import EngineConfig
from moed.server.heartbeats import make_heartbeats
from moed.server.messages import Join, Leave, NewFrontend
from moed.server.rank import run_rank
from moed.server.rank_process import Rank
from moed.server.watchdog import Stall, Watchdog
from moed.server.wiring import bind_store, local_environment

logger = logging.getLogger(__name__)

# For a rank that is well to give up the old group; one that takes longer starts anew.
LEAVE_GROUP_S = 8.0
# After a collective has failed: that of a rank which ends is known at once, and nothing else may be
# wrong.
SUSPENSE_S = 1.0

Spawn = Callable[[str, object, tuple[object, ...]], SpawnProcess]


class RankGroup:
    """The launcher alone uses it, from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        context: SpawnContext,
        spawn: Spawn,
        told: Mapping[str, str],
    ) -> None:
        """`told`: to the first rank, where the front end listens for all of them."""
        self._config = config
        self._context = context
        self._spawn = spawn
        self._told = dict(told)
        self._heartbeats = make_heartbeats(context, config.parallel.world_size)
        self.watchdog = Watchdog(self._heartbeats, config.server.recovery.step_timeout_s)
        self._formed_epoch = -1
        self.ranks: list[Rank] = []
        self.epoch = 0
        self._door_closes_at: float | None = None
        self._suspicious_since: float | None = None

    def start(self, store_socket: socket.socket | None) -> None:
        """One process per rank of this node; returns at once. `store_socket`: where the ranks meet,
        on the first node.
        """
        # Bound before and handed over open: between choosing a port and using it nobody can take
        # it.
        self.ranks = [
            self._start_rank(local_rank, store_socket)
            for local_rank in range(self._config.parallel.num_local_ranks)
        ]

    def _start_rank(self, local_rank: int, store_socket: socket.socket | None) -> Rank:
        environment = local_environment(self._config, local_rank, store_socket, self.epoch)
        rank = environment.rank
        pipe, far_end = self._context.Pipe()
        own_socket = store_socket if rank == 0 else None
        arguments = (self._config, environment, own_socket, self._told, far_end)
        process = self._spawn(f"moed-rank-{rank}", run_rank, (*arguments, self._heartbeats))
        far_end.close()
        return Rank(rank, process, pipe, self.epoch)

    # What is going on ----------------------------------------------------------------------------

    @property
    def pipes(self) -> list[Connection]:
        """For `wait`, with the processes' sentinels."""
        return [rank.pipe for rank in self.ranks if not rank.pipe.closed]

    @property
    def ended(self) -> list[Rank]:
        """Those whose process has ended, with what they said."""
        found = [rank for rank in self.ranks if not rank.process.is_alive()]
        for rank in found:
            rank.collect()
        return found

    @property
    def time_left_s(self) -> float | None:
        """Until `advance` has something to do whatever anybody says; None: not at all."""
        now = time.monotonic()
        times = [self.watchdog.time_left_s]
        if self._door_closes_at is not None:
            times.append(self._door_closes_at - now)
        if self._suspicious_since is not None:
            times.append(self._suspicious_since + SUSPENSE_S - now)
        known = [left for left in times if left is not None]
        return max(0.0, min(known)) if known else None

    def on_formed(self, epoch: int) -> None:
        """All ranks of `epoch` are ready."""
        self._formed_epoch = epoch

    def look(self) -> Stall | None:
        """What the watchdog has to tell."""
        if self.watchdog.time_left_s is None:
            return None
        pids = [rank.process.pid or 0 for rank in self.ranks]
        return self.watchdog.look(pids, self._formed_epoch == self.epoch)

    def turn_to_frontend(self, number: int, address: str) -> None:
        """Another front end will listen at `address`."""
        self._told = {"address": address}
        for rank in self.ranks:
            rank.tell(NewFrontend(number, address))

    # Another group -------------------------------------------------------------------------------

    def form_anew(self, lost: Sequence[Rank]) -> None:
        """Begin another epoch, with other processes for the `lost`."""
        self.epoch += 1
        self._suspicious_since = None
        self.watchdog.on_new_group()
        if not self._config.stays_in_process:
            for rank in self.ranks:
                rank.end(None)
                rank.pipe.close()
            with bind_store(self._config) as store_socket:
                self.start(store_socket)
            return
        for rank in self.ranks:
            if rank not in lost:
                rank.peer_gone = None
                rank.tell(Leave(self.epoch))
        for rank in lost:
            self._replace(rank)
        self._door_closes_at = time.monotonic() + LEAVE_GROUP_S

    def _replace(self, rank: Rank) -> None:
        rank.pipe.close()
        self.ranks[rank.rank] = self._start_rank(rank.rank, None)

    def advance(self) -> str | None:
        """Do what is due: let the ranks in once all are at the door. Returns why the group must be
        formed anew though no process has ended, or None.
        """
        for rank in self.ranks:
            rank.collect()
        if self._door_closes_at is not None:
            self._see_to_door()
            return None
        return self._suspicion()

    def _see_to_door(self) -> None:
        assert self._door_closes_at is not None
        late = [rank for rank in self.ranks if rank.door < self.epoch]
        if not late:
            self._door_closes_at = None
            with bind_store(self._config) as store_socket:
                join = Join(self.epoch, store_socket.getsockname()[1])
                for rank in self.ranks:
                    rank.let_in(join, store_socket)
        elif time.monotonic() > self._door_closes_at:
            self._door_closes_at += 60.0
            for rank in late:
                # One that was started for this epoch may take its time.
                if rank.has_come_up:
                    logger.warning("rank %d cannot leave the old group: ending it", rank.rank)
                    rank.end(None)
                    self._replace(rank)

    def _suspicion(self) -> str | None:
        gone = [
            rank.peer_gone
            for rank in self.ranks
            if rank.peer_gone is not None and rank.peer_gone.epoch == self.epoch
        ]
        if not gone:
            return None
        if self._suspicious_since is None:
            self._suspicious_since = time.monotonic()
        if time.monotonic() - self._suspicious_since < SUSPENSE_S:
            return None
        return f"rank {gone[0].rank} lost the others: {gone[0].error}"
