"""A rank that torchrun has started, and its node's keeper, if it is the one to have it."""

import logging
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError, PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.dist.torchrun_workers import a_worker_has_ended
from moed.server.keeper_process import KEEPER_ENDED, KeeperProcess
from moed.server.lifecycle import leave
from moed.server.node_messages import LinkLost, NodeStopping, ToKeeper
from moed.server.node_of_rank import NodeOfRank, tell_others
from moed.server.rank import describe_failure, serve_rank

logger = logging.getLogger(__name__)

STOPPED_BY_SIGTERM = 128 + signal.SIGTERM


class RankPlace:
    """A rank, and its node's keeper, if it is the one to have it. Use as a context."""

    def __init__(
        self, config: EngineConfig, environment: LaunchEnvironment, told: Mapping[str, str]
    ) -> None:
        self._config = config
        self._environment = environment
        nodes = config.nodes
        self._has_keeper = nodes is not None and nodes.node_rank > 0 and environment.local_rank == 0
        self._keeper: KeeperProcess | None = None
        tell = self._tell_keeper if self._has_keeper else None
        self.node = NodeOfRank(config, environment, told, tell)

    def __enter__(self) -> "RankPlace":
        if self._has_keeper:
            try:
                self._keeper = KeeperProcess(self._config)
            except MoedError as error:
                tell_others(self._environment, self._environment.local_world_size, error)
                raise
            threading.Thread(target=self._listen, args=(self._keeper,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def _tell_keeper(self, message: ToKeeper) -> None:
        if self._keeper is not None:
            self._keeper.tell(message)

    def _listen(self, keeper: KeeperProcess) -> None:
        """Ends the process with the link to the first node: the rank may be stuck in a collective
        for long.
        """
        while (message := keeper.receive()) is not None:
            if isinstance(message, LinkLost):
                logger.error("%s", message.error)
                leave(PeerLost.exit_code)
        if not keeper.is_closing:
            logger.error(KEEPER_ENDED)
            leave(PeerLost.exit_code)

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The front end stops all ranks together: it is asked to, where it does not know yet."""
        if not self.node.is_ready or a_worker_has_ended(self._environment.local_world_size):
            leave(STOPPED_BY_SIGTERM)
        self._tell_keeper(NodeStopping())


def serve_place(config: EngineConfig, environment: LaunchEnvironment, place: RankPlace) -> int:
    """Be one rank until the group stops; returns this process's exit code."""
    try:
        with place:
            serve_rank(config, environment, place.node)
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        logger.error("%srank %d failed: %s", failure.details, failure.rank, failure.error)
        return failure.exit_code
    return 0
