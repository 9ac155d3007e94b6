"""The front end's view of the other nodes: each sends a beat every second, and gets one back.
The launchers' orders and reports go the same way.

A node that is silent for `SILENT_S` turns readiness red; one that stays silent for the recovery
timeout is given up, and with it the group.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from moed.config.engine_config import EngineConfig
from moed.config.errors import PeerLost
from moed.server.channel import FrontendChannel
from moed.server.health import Health
from moed.server.messages import FromEngine, ToEngine
from moed.server.node_messages import Beat, NodeBeat, NodeOrder, NodeReport, Over, shortened

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 6.0
LEAST_LOST_S = 10.0
LOOK_S = 0.5


def lost_after_s(config: EngineConfig) -> float:
    """How long a silent node is waited for: a network that comes back costs no request."""
    return max(LEAST_LOST_S, config.server.recovery.recovery_timeout_s)


@dataclass
class Link:
    """One other node, once it has been heard."""

    beat: NodeBeat
    heard_at: float

    @property
    def description(self) -> str:
        beat = self.beat
        return f"node {beat.node} ({beat.name}, ranks {', '.join(map(str, beat.ranks))})"


class Links:
    """A channel that keeps the nodes' beats for itself, and watches them."""

    def __init__(
        self,
        channel: FrontendChannel,
        health: Health,
        on_stop_asked: Callable[[], None],
        on_report: Callable[[NodeReport], None],
        lost_after_s: float,
    ) -> None:
        self._channel = channel
        self._health = health
        self._on_stop_asked = on_stop_asked
        self._on_report = on_report
        self._lost_after_s = lost_after_s
        self._links: dict[int, Link] = {}
        self._is_stopping = self._is_over = False

    async def receive(self) -> FromEngine:
        """The next message of an engine."""
        while True:
            match await self._channel.receive():
                case NodeBeat() as beat:
                    self.on_beat(beat, time.monotonic())
                case NodeReport() as report:
                    self._on_report(report)
                case message:
                    return message

    def send(self, rank: int, message: ToEngine) -> None:
        self._channel.send(rank, message)

    def start_epoch(self, epoch: int) -> None:
        self._channel.start_epoch(epoch)

    def on_beat(self, beat: NodeBeat, now: float) -> None:
        self._links[beat.node] = Link(beat, now)
        self._channel.send_to_node(beat.node, Beat())
        if beat.is_stopping and not self._is_stopping:
            self._is_stopping = True
            logger.info("node %d (%s) was asked to stop: all stop", beat.node, beat.name)
            self._on_stop_asked()

    def forget(self) -> None:
        """All nodes begin anew, by themselves."""
        self._links = {}
        self._is_stopping = False

    def order(self, order: NodeOrder) -> None:
        """Take it to the node's launcher, if that has been heard."""
        if order.node in self._links:
            self._channel.send_to_node(order.node, order)

    def end_all(self, error: str) -> None:
        """Tell all nodes, once, that the launch ends; `error` is empty where it was asked to."""
        told = () if self._is_over else tuple(self._links)
        self._is_over = True
        for node in told:
            self._channel.send_to_node(node, Over(shortened(error)))

    async def watch(self) -> None:
        """Until cancelled. Raises `PeerLost` for a node that stays silent."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            # What came while this process itself stood still has not been read yet.
            if now - before < 2 * LOOK_S + BEAT_S:
                self.look(now)

    def look(self, now: float) -> None:
        """Update readiness. Raises `PeerLost`."""
        silent = {
            link.description: now - link.heard_at
            for link in self._links.values()
            if now - link.heard_at > SILENT_S
        }
        reasons = [
            f"{description} has been silent for {seconds:.0f} s"
            for description, seconds in silent.items()
        ]
        if bool(reasons) != bool(self._health.silence):
            if reasons:
                logger.warning("not ready: %s", "; ".join(reasons))
            else:
                logger.info("all nodes are heard again")
        self._health.silence = "; ".join(reasons)
        for description, seconds in silent.items():
            if seconds > self._lost_after_s and not self._is_stopping:
                raise PeerLost(
                    f"{description} has been silent for {seconds:.0f} s: it ended, as its log then "
                    "says, or the network between is cut"
                )
