"""Every message between the nodes: the first node's launcher and front end, and the launcher and
keeper of each other node.

Orders and reports say how things should be and how they are, not what has changed: one that is lost
on the way, or comes twice, does no harm. Each carries the epoch that it is about, and has bounds.
"""

from typing import Annotated

import msgspec

MAX_TEXT_CHARACTERS = 4000
MAX_RANKS_OF_NODE = 1024

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


def shortened(text: str) -> str:
    """As much of it as goes into a `Text`."""
    return text[:MAX_TEXT_CHARACTERS]


# The link ----------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True, tag="joined", kw_only=True):
    """From the first rank of a node to the node's keeper: all ranks have met."""

    node: int
    name: str
    ranks: list[int]
    address: str
    secret: bytes


class RanksReady(msgspec.Struct, frozen=True, tag="ranks_ready"):
    """This node's ranks have done a real step with all others."""


class NodeStopping(msgspec.Struct, frozen=True, tag="node_stopping"):
    """This node was asked to stop."""


class LinkLost(msgspec.Struct, frozen=True, tag="link_lost"):
    """From a node's keeper: nothing has been heard of the first node for too long."""

    error: str


class NodeBeat(msgspec.Struct, frozen=True, tag="node_beat"):
    """From each node but the first, every second: it is there, and the way to it is open."""

    node: int
    name: str
    """Of the host."""
    ranks: list[int]
    is_stopping: bool = False
    """Somebody has asked this node to stop: the whole group will."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The front end's answer to a `NodeBeat`."""


# Recovery ----------------------------------------------------------------------------------------


class RankReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank, as its node's launcher sees it."""

    number: Number
    """How many processes of this rank there have been before."""
    pid: Number
    exit_code: int | None = None
    """None while it runs."""
    error: Text = ""
    """Its last words."""
    error_code: int = 0
    """The exit code that goes with them."""
    is_consequence: bool = False
    has_come_up: bool = False
    door: int = -1
    """The epoch at whose door it stands."""
    lost_epoch: int = -1
    """Of the last collective that failed there, though it is well itself."""
    lost_error: Text = ""
    is_stopped: bool = False
    """By a signal."""
    num_entered: Number = 0
    is_inside: bool = False
    still_s: float | None = None
    """Since it entered or left a collective; None: never yet."""
    step_id: int = 0
    wake_number: int = 0
    is_asleep: bool = False


class NodeReport(msgspec.Struct, frozen=True, tag="node_report", kw_only=True):
    """From the launcher of a node, twice a second and whenever something has changed."""

    node: Number
    name: Text
    """Of the host."""
    launcher: Text
    """Differs from that of a launcher that was there before."""
    epoch: Number
    order: Number
    """The last one that was carried out."""
    ranks: Annotated[list[RankReport], msgspec.Meta(max_length=MAX_RANKS_OF_NODE)]


class NodeOrder(msgspec.Struct, frozen=True, tag="node_order", kw_only=True):
    """From the first node's launcher to that of another: how its ranks should be."""

    node: Number
    number: Number
    """Each order has a higher one than those before."""
    epoch: Number
    """Older groups are left."""
    rank_numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_RANKS_OF_NODE)]
    """As `RankReport.number`: a higher one asks for another process, of this epoch."""
    store_port: Port = 0
    """Where the ranks of this epoch meet; 0: they wait at the door."""
    frontend: Number = 0
    """How many front ends there have been before the one that listens now."""
    trouble: Text = ""
    """Why the node is not ready; empty: it is, for all that the first node knows."""
    stacks_of: Annotated[list[Number], msgspec.Meta(max_length=MAX_RANKS_OF_NODE)] = []
    """Local ranks that should write their stacks to the log."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """From the front end to each node: the launch ends."""

    error: Text
    """Why; empty: it was asked to, and ranks leave by themselves."""


ToKeeper = Joined | RanksReady | NodeStopping | NodeReport
FromKeeper = LinkLost | NodeOrder | Over
# By the link: from a node, and to one.
FromNode = NodeBeat | NodeReport
ToNode = Beat | NodeOrder | Over
