"""Front end and engines accept each other alone, whatever a stranger on the network does."""

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from zmq.utils import z85

from moed.server import channel as channel_module
from moed.server.channel import EngineChannel, FrontendChannel
from moed.server.messages import FromEngine, RankProgress, Wake
from moed.server.wire import Wire, engine_keys, frontend_keys

WAIT_S = 10.0
# How long nothing may come of what a stranger does.
QUIET_S = 0.4


class Place:
    """A listening socket of this machine's loopback, and the wire that leads to it."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.wire = Wire(f"tcp://127.0.0.1:{self.port}", secret or secrets.token_bytes(32))

    def open(self, epoch: int = 0) -> FrontendChannel:
        return FrontendChannel(self.wire, self.listener.fileno(), epoch)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.listener.detach()


async def heard(channel: FrontendChannel, timeout_s: float = WAIT_S) -> FromEngine | None:
    try:
        return await asyncio.wait_for(channel.receive(), timeout_s)
    except TimeoutError:
        return None


def progress(rank: int = 0) -> RankProgress:
    return RankProgress(rank=rank, phase="loading the model")


async def assert_engine_gets_through(place: Place, channel: FrontendChannel) -> None:
    """Both ways."""
    engine = EngineChannel(place.wire, 0, 0, None)
    try:
        engine.send(progress())
        assert await heard(channel) == progress()
        channel.send(0, Wake(7))
        assert await asyncio.to_thread(engine.wait, WAIT_S)
        assert engine.receive() == [Wake(7)]
    finally:
        await asyncio.to_thread(engine.close)


def stranger(place: Place) -> "zmq.Socket[bytes]":
    found: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.IDENTITY, b"rank-0-0")
    return found


def without_keys(place: Place) -> "zmq.Socket[bytes]":
    return stranger(place)


def with_keys_of_its_own(place: Place) -> "zmq.Socket[bytes]":
    """And the front end's public one, which it may have seen."""
    found = stranger(place)
    found.curve_publickey, found.curve_secretkey = zmq.curve_keypair()
    assert place.wire.secret is not None
    found.curve_serverkey = frontend_keys(place.wire.secret).public
    return found


def with_keys_of_another_launch(place: Place) -> "zmq.Socket[bytes]":
    found = stranger(place)
    other = Wire(place.wire.address, secrets.token_bytes(32))
    assert other.secret is not None
    own = engine_keys(other.secret)
    found.curve_publickey, found.curve_secretkey = own.public, own.private
    found.curve_serverkey = frontend_keys(other.secret).public
    return found


@pytest.mark.parametrize("make", [without_keys, with_keys_of_its_own, with_keys_of_another_launch])
def test_a_stranger_gets_nothing_and_changes_nothing(place: Place, make: object) -> None:
    async def run() -> None:
        channel = place.open()
        other = make(place)  # type: ignore[operator]
        try:
            other.connect(place.wire.address)
            other.send(msgspec.msgpack.encode(progress(rank=3)))
            assert await heard(channel, QUIET_S) is None
            channel.send(0, Wake(1))
            assert not await asyncio.to_thread(other.poll, int(QUIET_S * 1000))
            # It has the name of rank 0, and rank 0 still gets through.
            await assert_engine_gets_through(place, channel)
        finally:
            other.close(0)
            channel.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\xff" + struct.pack(">Q", 2**63 - 1) + b"\x7f",
        secrets.token_bytes(100_000),
        # A greeting of ZeroMQ that asks for no security, and then a frame of 2^62 bytes.
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL"
        + b"\x00" * 48
        + b"\x02"
        + struct.pack(">Q", 2**62),
    ],
)
def test_garbage_is_cut_off(place: Place, garbage: bytes) -> None:
    async def run() -> None:
        channel = place.open()
        try:
            with socket.create_connection(("127.0.0.1", place.port), WAIT_S) as connection:
                connection.sendall(garbage)
                assert await heard(channel, QUIET_S) is None
                await assert_engine_gets_through(place, channel)
        finally:
            channel.close()

    asyncio.run(run())


class Recorder:
    """Stands between an engine and the front end, and keeps what the engine says."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = port
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port), WAIT_S)
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        with near, far, contextlib.suppress(OSError):
            while data := near.recv(65536):
                self.said += data
                far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)
            back.join(WAIT_S)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


def test_a_replay_is_worth_nothing(place: Place) -> None:
    async def run() -> None:
        channel = place.open()
        recorder = Recorder(place.port)
        engine = EngineChannel(Wire(recorder.address, place.wire.secret), 0, 0, None)
        engine.send(progress(rank=5))
        assert await heard(channel) == progress(rank=5)
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(recorder.close)
        try:
            # What it said was encrypted, too.
            assert recorder.said and b"loading" not in recorder.said
            with socket.create_connection(("127.0.0.1", place.port), WAIT_S) as connection:
                connection.sendall(recorder.said)
                assert await heard(channel, QUIET_S) is None
        finally:
            channel.close()

    asyncio.run(run())


def test_an_engine_hears_no_front_end_but_its_own(place: Place) -> None:
    """One that has the engines' public key lets them in, and still cannot speak to them."""
    false: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    false.setsockopt(zmq.LINGER, 0)
    false.curve_server = True
    false.curve_publickey, false.curve_secretkey = zmq.curve_keypair()
    port = false.bind_to_random_port("tcp://127.0.0.1")
    engine = EngineChannel(Wire(f"tcp://127.0.0.1:{port}", place.wire.secret), 0, 0, None)
    try:
        engine.send(progress())
        assert not false.poll(int(QUIET_S * 1000))
        assert not engine.wait(QUIET_S)
    finally:
        false.close(0)
        engine.close()


def test_what_is_no_message_is_dropped_and_said(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        channel = place.open()
        engine = EngineChannel(place.wire, 0, 0, None)
        try:
            for payload in (b"", b"\xc1", msgspec.msgpack.encode({"type": "no such"})):
                engine._socket.send(payload)
            engine._socket.send_multipart([b"a", b"b", b"c"])
            engine.send(progress())
            assert await heard(channel) == progress()
        finally:
            await asyncio.to_thread(engine.close)
            channel.close()

    with caplog.at_level(logging.ERROR, channel_module.__name__):
        asyncio.run(run())
    assert len(caplog.records) == 4


def test_a_message_too_long_ends_its_connection_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 10_000)

    async def run() -> None:
        channel = place.open()
        other = EngineChannel(place.wire, 1, 0, None)
        try:
            other._socket.send(b"x" * 1_000_000)
            assert await heard(channel, QUIET_S) is None
            await assert_engine_gets_through(place, channel)
        finally:
            await asyncio.to_thread(other.close)
            channel.close()

    asyncio.run(run())


def test_an_older_epoch_is_not_heard_and_a_newer_one_waits(place: Place) -> None:
    async def run() -> None:
        channel = place.open(epoch=1)
        engines = [EngineChannel(place.wire, 0, epoch, None) for epoch in range(3)]
        try:
            for number, engine in enumerate(engines):
                engine.send(progress(rank=number))
            assert await heard(channel) == progress(rank=1)
            assert await heard(channel, QUIET_S) is None
            channel.start_epoch(2)
            assert await heard(channel) == progress(rank=2)
        finally:
            for engine in engines:
                await asyncio.to_thread(engine.close)
            channel.close()

    asyncio.run(run())


def test_keys_follow_from_the_secret_and_differ_by_owner() -> None:
    one, two = secrets.token_bytes(32), secrets.token_bytes(32)
    assert frontend_keys(one) == frontend_keys(one)
    found = {
        keys.private
        for secret in (one, two)
        for keys in (frontend_keys(secret), engine_keys(secret))
    }
    assert len(found) == 4 and one not in {z85.decode(private) for private in found}
