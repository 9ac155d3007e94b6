"""The wire between the front end and the engines: ZeroMQ, one socket each, typed messages only.

The front end binds a ROUTER; each engine connects a DEALER named after its rank and the epoch of
its group, so that nothing of an older epoch reaches anybody. Order is kept per engine. An engine
speaks first (`RankProgress`), since a ROUTER can only write to peers that it has heard.
`moed.server.wire` says who is let in.
"""

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from moed.config.errors import PeerLost
from moed.server.messages import (
    FromEngine,
    FrontendReplaced,
    NewFrontend,
    RankReady,
    ToEngine,
    Wake,
)
from moed.server.node_messages import ToNode
from moed.server.wire import Wire, engine_keys, frontend_keys

logger = logging.getLogger(__name__)

# A message is a prompt or a step's tokens. The front end refuses longer prompts; this bounds what a
# fault could send.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# Then others on the event loop have their turn.
MAX_TAKEN_AT_ONCE = 16
MAX_PENDING_MESSAGES = 100_000
SEND_TIMEOUT_S = 30

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def _identity(rank: int, epoch: int) -> bytes:
    return b"rank-%d-%d" % (rank, epoch)


NODE = b"node-"


def node_identity(node: int) -> bytes:
    """Of the keeper of a node, which lives through all epochs."""
    return NODE + b"%d" % node


def epoch_of(identity: bytes) -> int:
    """-1 for what no rank is called."""
    number = identity.rpartition(b"-")[2]
    return int(number) if number.isdigit() else -1


def first_wake_number(frontend_number: int) -> int:
    """Above all numbers of the front ends before it."""
    return frontend_number << 32


class Orders(Protocol):
    """What is needed of `moed.server.orders.Orders`."""

    wake_fd: int

    def check(self) -> None: ...

    def clear_wake(self) -> None: ...

    def take_frontend(self) -> NewFrontend | None: ...


def _configure(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_PENDING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_PENDING_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def connect(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", wire: Wire, identity: bytes) -> None:
    """A rank's or a node's DEALER, with this launch's keys."""
    _configure(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IPV6, 1)
    if wire.secret is not None:
        own = engine_keys(wire.secret)
        socket.curve_publickey, socket.curve_secretkey = own.public, own.private
        socket.curve_serverkey = frontend_keys(wire.secret).public
    socket.connect(wire.address)


class EnginesOnly:
    """Lets in who has the engines' key: asked by ZeroMQ for each connection (ZAP)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class EngineChannel:
    """The engine's end. Not thread-safe: only the engine's loop uses it."""

    def __init__(self, wire: Wire, rank: int, epoch: int, orders: Orders | None) -> None:
        """`orders` of a launcher that can form the group anew; None: there is none."""
        self._context = zmq.Context(io_threads=1)
        self._identity = _identity(rank, epoch)
        self._orders = orders
        self._wire = wire
        self._ready: RankReady | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        if orders is not None:
            self._poller.register(orders.wake_fd, zmq.POLLIN)
        self._socket = self._connect(wire)

    def _connect(self, wire: Wire) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_S * 1000)
        connect(socket, wire, self._identity)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def receive(self) -> list[ToEngine]:
        """All messages that have arrived, in order; never blocks. Raises `GroupLeft` when the group
        is formed anew.
        """
        messages: list[ToEngine] = []
        if self._orders is not None:
            self._orders.check()
            if (new := self._orders.take_frontend()) is not None:
                self._turn_to(replace(self._wire, address=new.address))
                messages += [FrontendReplaced(), Wake(first_wake_number(new.number))]
        while True:
            try:
                messages.append(_to_engine.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def _turn_to(self, wire: Wire) -> None:
        """What was on its way to the old front end is dropped; the new one is told as much as it
        needs.
        """
        self._poller.unregister(self._socket)
        self._socket.close(linger=0)
        self._socket = self._connect(wire)
        if self._ready is not None:
            self.send(self._ready)

    def wait(self, timeout_s: float) -> bool:
        """Block, without using the CPU, until a message or an order is there (True) or the time is
        over (False).
        """
        found = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._orders is not None and self._orders.wake_fd in found:
            self._orders.clear_wake()
        return bool(found)

    def send(self, message: FromEngine) -> None:
        """Queue one message. Raises `PeerLost` when the front end has not read for long."""
        if isinstance(message, RankReady):
            self._ready = message
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again:
            raise PeerLost(
                f"the front end has not read any message for {SEND_TIMEOUT_S} s"
            ) from None

    def close(self) -> None:
        """Let what is queued leave, within half a second. Safe to call twice."""
        self._socket.close(linger=500)
        self._context.term()


def _failure(sent: "asyncio.Future[Any]") -> BaseException | None:
    return None if sent.cancelled() else sent.exception()


class FrontendChannel:
    """The front end's end, for one asyncio loop."""

    def __init__(self, wire: Wire, listen_fd: int | None, epoch: int) -> None:
        """`listen_fd`: the bound socket of a `tcp://` address; None binds here."""
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        # Without it, a message to a rank that is gone would vanish without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # An engine that turns here from the front end before may come twice; the last time counts.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._gate: AsyncioAuthenticator | None = None
        if wire.secret is not None:
            self._close_to_others(wire.secret)
        if listen_fd is not None:
            self._socket.setsockopt(zmq.USE_FD, listen_fd)
        self._socket.bind(wire.address)
        self._encoder = msgspec.msgpack.Encoder()
        # The same socket, read without the event loop.
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._received: deque[list[bytes]] = deque()
        self._epoch = epoch
        # Of an epoch that the launcher has not told of yet.
        self._early: list[list[bytes]] = []

    def _close_to_others(self, secret: bytes) -> None:
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(
            "*", credentials_provider=EnginesOnly(engine_keys(secret).public)
        )
        own = frontend_keys(secret)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = own.public, own.private

    def start_epoch(self, epoch: int) -> None:
        """Hear and address the ranks of `epoch` alone from now on."""
        self._epoch = epoch
        self._received.extendleft(reversed(self._early))
        self._early = []

    async def receive(self) -> FromEngine:
        """The next message of any engine of this epoch. Raises `CancelledError` as usual."""
        while True:
            if not self._received:
                await asyncio.sleep(0)
                if not self._take_what_is_there():
                    self._received.append(await self._socket.recv_multipart())
            frames = self._received.popleft()
            epoch = epoch_of(frames[0])
            if epoch == self._epoch or frames[0].startswith(NODE):
                try:
                    _, payload = frames
                    return _from_engine.decode(payload)
                except (ValueError, msgspec.MsgspecError) as error:
                    logger.error("dropped what no engine of this version sends: %s", error)
            elif epoch > self._epoch:
                self._early.append(frames)

    def _take_what_is_there(self) -> bool:
        """Messages that can be had without waiting: waiting costs more than a message does."""
        for _ in range(MAX_TAKEN_AT_ONCE):
            try:
                self._received.append(self._plain.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return bool(self._received)

    def send(self, rank: int, message: ToEngine) -> None:
        """Queue one message for an engine that has spoken before; order is kept. A lost engine is
        only logged: the launcher tells of it on its own way."""

        def log_failure(sent: "asyncio.Future[Any]") -> None:
            if (error := _failure(sent)) is not None:
                logger.warning("a message to rank %d could not be sent: %s", rank, error)

        self._send(_identity(rank, self._epoch), message).add_done_callback(log_failure)

    def send_to_node(self, node: int, message: ToNode) -> None:
        """As `send`, to the keeper of another node. One that is gone is known by its silence."""
        self._send(node_identity(node), message).add_done_callback(_failure)

    def _send(self, identity: bytes, message: ToEngine | ToNode) -> "asyncio.Future[Any]":
        frames = [identity, self._encoder.encode(message)]
        return asyncio.ensure_future(self._socket.send_multipart(frames))

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close(linger=500)
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.term()
