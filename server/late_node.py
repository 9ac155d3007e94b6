"""How a node that was lost finds its launch again, which has formed other groups since.

The ranks of the first group meet at a store on the port that all nodes were given. That store is
gone with the first group, and the first node's launcher answers there itself: it says where its
front end listens, as the store has said. So the launcher of a node that was started again has the
link without a meeting, and the first node orders it what its ranks should do.
"""

import contextlib
import logging
import select
import socket
from collections.abc import Mapping

import msgspec

from moed.config.nodes import NodesConfig

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
# A store says nothing before it is asked: so much is waited for a launcher that speaks first.
ANSWER_S = 0.5
MAX_ANSWER_BYTES = 65536
MAX_ANSWERS = 16


class Underway(msgspec.Struct, frozen=True, tag="moed_underway"):
    """The launch has groups behind it. Sent to whoever connects, who must know the rest: see
    `moed.server.wire`.
    """

    missing: list[int]
    """Nodes that are not heard: no other may come."""
    told: dict[str, str]


_underway = msgspec.msgpack.Decoder(Underway)


class Reception:
    """On the first node: answers where the ranks of the first group have met."""

    def __init__(self, listener: socket.socket, told: Mapping[str, str]) -> None:
        self.listener = listener
        self._told = dict(told)

    def answer(self, missing: list[int]) -> None:
        """Whoever has come."""
        data = msgspec.msgpack.encode(Underway(missing, self._told))
        for _ in range(MAX_ANSWERS):
            if not select.select([self.listener], [], [], 0.0)[0]:
                return
            with contextlib.suppress(OSError):
                connection, _ = self.listener.accept()
                with connection:
                    connection.settimeout(CONNECT_S)
                    connection.sendall(data)


def find_launch(nodes: NodesConfig) -> Mapping[str, str] | None:
    """What the first node tells this one, if it has been lost; None: it does not, so the ranks meet
    in the usual way.
    """
    try:
        with socket.create_connection((nodes.master_addr, nodes.master_port), CONNECT_S) as peer:
            peer.settimeout(ANSWER_S)
            data = b""
            while len(data) < MAX_ANSWER_BYTES and (part := peer.recv(MAX_ANSWER_BYTES)):
                data += part
    except OSError:
        return None
    try:
        found = _underway.decode(data)
    except msgspec.MsgspecError:
        return None
    return found.told if nodes.node_rank in found.missing else None
