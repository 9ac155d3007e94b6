"""The processes of this node's ranks: started, replaced, ended."""

import socket
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from moed.config.engine_config import EngineConfig
from moed.server.heartbeats import Beat, make_heartbeats, read_beats
from moed.server.processes import spawn
from moed.server.rank import run_rank
from moed.server.rank_process import Rank
from moed.server.wiring import local_environment


class LocalRanks:
    """The launcher alone uses it, from one thread."""

    def __init__(
        self, config: EngineConfig, context: SpawnContext, told: Mapping[str, str]
    ) -> None:
        """`told`: to the first rank, where the front end listens for all of them."""
        self._config = config
        self._context = context
        self.told = dict(told)
        self._heartbeats = make_heartbeats(context, config.parallel.world_size)
        self.ranks: list[Rank] = []

    def start(
        self,
        store_socket: socket.socket | None,
        epoch: int = 0,
        store_port: int | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        """One process per rank of this node, whatever there was before; returns at once.
        `store_socket`: where the ranks meet, on the first node; `store_port`: there, on others, if
        it is not the usual one. `numbers`: as `replace`.
        """
        # Bound before and handed over open: between choosing a port and using it nobody can take
        # it.
        if store_socket is not None:
            store_port = store_socket.getsockname()[1]
        numbers = numbers or [rank.number + 1 for rank in self.ranks]
        self.forget()
        num_local = self._config.parallel.num_local_ranks
        self.ranks = [
            self._start_rank(local_rank, epoch, store_socket, store_port, number)
            for local_rank, number in enumerate(numbers or [0] * num_local)
        ]

    def replace(
        self, rank: Rank, epoch: int, store_port: int | None = None, number: int | None = None
    ) -> None:
        """Another process, for `epoch`; `number`: which one it is, by the count of the first node's
        launcher.
        """
        rank.end(None)
        rank.pipe.close()
        local_rank = self.ranks.index(rank)
        number = rank.number + 1 if number is None else number
        self.ranks[local_rank] = self._start_rank(local_rank, epoch, None, store_port, number)

    def _start_rank(
        self,
        local_rank: int,
        epoch: int,
        store_socket: socket.socket | None,
        store_port: int | None,
        number: int,
    ) -> Rank:
        environment = local_environment(self._config, local_rank, store_port, epoch)
        rank = environment.rank
        pipe, far_end = self._context.Pipe()
        own_socket = store_socket if rank == 0 else None
        arguments = (self._config, environment, own_socket, self.told, far_end, self._heartbeats)
        process = spawn(self._context, f"moed-rank-{rank}", run_rank, arguments)
        far_end.close()
        return Rank(rank, process, pipe, epoch, number)

    def collect(self) -> None:
        """Take in what they have said."""
        for rank in self.ranks:
            rank.collect()

    @property
    def pipes(self) -> list[Connection]:
        return [rank.pipe for rank in self.ranks if not rank.pipe.closed]

    @property
    def sentinels(self) -> list[int]:
        """Of the processes, also of those that have ended."""
        return [rank.process.sentinel for rank in self.ranks]

    @property
    def ended(self) -> list[Rank]:
        """Those whose process has ended, with what they said."""
        found = [rank for rank in self.ranks if not rank.process.is_alive()]
        for rank in found:
            rank.collect()
        return found

    @property
    def beats(self) -> list[Beat]:
        """By rank, over all nodes; true for those of this one."""
        return read_beats(self._heartbeats)

    def forget(self) -> None:
        """End all, and have none until the next start."""
        self.end_all()
        for rank in self.ranks:
            rank.pipe.close()
        self.ranks = []

    def end_all(self) -> None:
        """Now, whatever they are doing."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
