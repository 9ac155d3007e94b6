"""All ranks of one launch, on all nodes: started together, and formed anew after the loss of one.

A new group has a new epoch. Where ranks outlive it, each gives up the old group and comes to the
door, and those that were lost are started again; when all are there they are let in. A loss on the
way begins another epoch. Otherwise all ranks start again. Each node's launcher has the processes of
its own ranks; that of the first node decides, here.
"""

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from moed.config.engine_config import EngineConfig
from moed.server.far_node import FarNode, FarRank
from moed.server.heartbeats import Beat
from moed.server.lifecycle import FrontendPlace
from moed.server.local_ranks import LocalRanks
from moed.server.messages import Join, Leave, NewFrontend
from moed.server.node_messages import NodeOrder, NodeReport
from moed.server.rank_process import AnyRank, Rank
from moed.server.watchdog import Stall, Watchdog
from moed.server.wiring import bind_store

logger = logging.getLogger(__name__)

# For a rank that is well to give up the old group; one that takes longer starts anew.
LEAVE_GROUP_S = 8.0
# For those that have started anew, which load all that they had.
START_ANEW_S = 60.0
# After a collective has failed: that of a rank which ends is known at once, and nothing else may be
# wrong.
SUSPENSE_S = 1.0


class RankGroup:
    """The first node's launcher alone uses it, from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        context: SpawnContext,
        told: Mapping[str, str],
        send: Callable[[NodeOrder], object],
    ) -> None:
        """`told`: to the first rank, where the front end listens for all of them. `send` takes an
        order to another node's launcher.
        """
        self._config = config
        self._local = LocalRanks(config, context, told)
        num_nodes = 1 if config.nodes is None else config.nodes.num_nodes
        num_local = config.parallel.num_local_ranks
        self._far_nodes = [
            FarNode(node, range(node * num_local, (node + 1) * num_local), send)
            for node in range(1, num_nodes)
        ]
        self.watchdog = Watchdog(lambda: self._beats or [], config.server.recovery.step_timeout_s)
        self._formed_epoch = -1
        self.epoch = 0
        self._door_closes_at: float | None = None
        self._suspicious_since: float | None = None

    def start(self, store_socket: socket.socket) -> None:
        """One process per rank of this node; returns at once. `store_socket`: where the ranks of
        all nodes meet.
        """
        self._local.start(store_socket)

    # What is going on ----------------------------------------------------------------------------

    @property
    def ranks(self) -> list[AnyRank]:
        """All, in order."""
        return [*self._local.ranks, *(rank for node in self._far_nodes for rank in node.ranks)]

    @property
    def local(self) -> LocalRanks:
        return self._local

    @property
    def sources(self) -> list[Connection | int]:
        """For `wait`: there is news of the ranks of this node."""
        return [*self._local.pipes, *self._local.sentinels]

    @property
    def ended(self) -> list[AnyRank]:
        """Those whose process has ended, with what they said."""
        self._local.collect()
        return [rank for rank in self.ranks if rank.exit_code is not None]

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

    def on_report(self, report: NodeReport) -> None:
        """What another node's launcher sees of its ranks."""
        for node in self._far_nodes[max(0, report.node - 1) : report.node]:
            node.on_report(report)

    @property
    def missing_nodes(self) -> list[int]:
        """Those that are not heard for now."""
        return [node.node for node in self._far_nodes if node.is_silent]

    def on_formed(self, epoch: int) -> None:
        """All ranks of `epoch` are ready."""
        self._formed_epoch = epoch
        if epoch == self.epoch:
            self.tell_trouble("")

    def look(self) -> Stall | None:
        """What the watchdog has to tell."""
        if self.watchdog.time_left_s is None or self._beats is None:
            return None
        stopped = [rank.rank for rank in self.ranks if rank.is_stopped]
        return self.watchdog.look(stopped, self._formed_epoch == self.epoch)

    @property
    def _beats(self) -> list[Beat] | None:
        """By rank; None where those of a node are not known for now."""
        beats = self._local.beats[: len(self._local.ranks)]
        for node in self._far_nodes:
            if node.beats is None:
                return None
            beats += node.beats
        return beats

    def ask_for_stacks(self, rank: int | None) -> None:
        """Of this one, or of all: into the log of its node."""
        for local in self._local.ranks:
            if rank is None or local.rank == rank:
                logger.warning("process %d: %s", local.pid, local.stacks())
        for node in self._far_nodes:
            node.ask_for_stacks(rank)

    def tell_trouble(self, text: str) -> None:
        """The other nodes: why they are not ready; empty: they are."""
        for node in self._far_nodes:
            node.tell_trouble(text)

    def turn_to_frontend(self, place: FrontendPlace) -> None:
        """Another front end will listen there."""
        number, address = place.number, place.wire.address
        self._local.told |= {"address": address}
        for rank in self._local.ranks:
            rank.tell(NewFrontend(number, address))
        for node in self._far_nodes:
            node.turn_to_frontend(number)

    # Another group -------------------------------------------------------------------------------

    def form_anew(self, lost: Collection[AnyRank]) -> None:
        """Begin another epoch, with other processes for the `lost`."""
        self.epoch += 1
        self._suspicious_since = None
        self.watchdog.on_new_group()
        if not self._config.stays_in_process:
            self._start_all_again()
            return
        for rank in self._local.ranks:
            if rank not in lost:
                rank.peer_gone = None
                rank.tell(Leave(self.epoch))
        for rank in [rank for rank in self._local.ranks if rank in lost]:
            self._replace(rank)
        for node in self._far_nodes:
            node.form_anew(self.epoch, lost, 0)
        self._door_closes_at = time.monotonic() + LEAVE_GROUP_S

    def _start_all_again(self) -> None:
        self._local.end_all()
        with bind_store(self._config, self.epoch) as store_socket:
            for node in self._far_nodes:
                node.form_anew(self.epoch, node.ranks, store_socket.getsockname()[1])
            self._local.start(store_socket, self.epoch)

    def _replace(self, rank: AnyRank) -> None:
        if isinstance(rank, Rank):
            self._local.replace(rank, self.epoch)
        for node in self._far_nodes:
            if isinstance(rank, FarRank) and rank in node.ranks:
                node.replace(rank)

    def advance(self) -> str | None:
        """Do what is due: let the ranks in once all are at the door. Returns why the group must be
        formed anew though no process has ended, or None.
        """
        self._local.collect()
        if self._door_closes_at is not None:
            self._see_to_door(self._door_closes_at)
            return None
        return self._suspicion()

    def _see_to_door(self, closes_at: float) -> None:
        late = [rank for rank in self.ranks if rank.door < self.epoch]
        if not late:
            self._door_closes_at = None
            self._let_in()
        elif time.monotonic() > closes_at:
            self._door_closes_at = closes_at + START_ANEW_S
            self._start_anew(late)

    def _let_in(self) -> None:
        with bind_store(self._config, self.epoch) as store_socket:
            port = store_socket.getsockname()[1]
            for rank in self._local.ranks:
                rank.let_in(Join(self.epoch, port), store_socket)
            for node in self._far_nodes:
                node.let_in(port)

    def _start_anew(self, late: Sequence[AnyRank]) -> None:
        for rank in late:
            # One that was started for this epoch may take its time.
            if rank.has_come_up:
                logger.warning("rank %d cannot leave the old group: ending it", rank.rank)
                self._replace(rank)

    def _suspicion(self) -> str | None:
        found = [rank.peer_gone for rank in self.ranks]
        gone = [one for one in found if one is not None and one.epoch == self.epoch]
        if not gone:
            return None
        if self._suspicious_since is None:
            self._suspicious_since = time.monotonic()
        if time.monotonic() - self._suspicious_since < SUSPENSE_S:
            return None
        return f"rank {gone[0].rank} lost the others: {gone[0].error}"
