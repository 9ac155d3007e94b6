"""The wire between the front end and the engines: ZeroMQ, one socket each, typed messages only.

The front end binds a ROUTER; each engine connects a DEALER named after its rank. Order is kept per
engine. An engine speaks first (`RankProgress`), since a ROUTER can only write to peers that it has
heard.
"""

import asyncio
import logging
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from moed.config.errors import PeerLost
from moed.server.messages import FromEngine, ToEngine

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


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank


def _configure(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_PENDING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_PENDING_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class EngineChannel:
    """The engine's end. Not thread-safe: only the engine's loop uses it."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, _identity(rank))
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_S * 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self) -> list[ToEngine]:
        """All messages that have arrived, in order; never blocks."""
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(_to_engine.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def wait(self, timeout_s: float) -> bool:
        """Block, without using the CPU, until a message is there (True) or the time is over
        (False).
        """
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def send(self, message: FromEngine) -> None:
        """Queue one message. Raises `PeerLost` when the front end has not read for long."""
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


class FrontendChannel:
    """The front end's end, for one asyncio loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        # Without it, a message to a rank that is gone would vanish without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        # The same socket, read without the event loop.
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._received: deque[list[bytes]] = deque()

    async def receive(self) -> FromEngine:
        """The next message of any engine. Raises `asyncio.CancelledError` as usual."""
        if not self._received:
            await asyncio.sleep(0)
            if not self._take_what_is_there():
                self._received.append(await self._socket.recv_multipart())
        _, payload = self._received.popleft()
        return _from_engine.decode(payload)

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
        sent = asyncio.ensure_future(
            self._socket.send_multipart([_identity(rank), self._encoder.encode(message)])
        )
        sent.add_done_callback(lambda done: self._log_failure(rank, done))

    @staticmethod
    def _log_failure(rank: int, sent: "asyncio.Future[Any]") -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            logger.warning("a message to rank %d could not be sent: %s", rank, error)

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close(linger=500)
        self._context.term()
