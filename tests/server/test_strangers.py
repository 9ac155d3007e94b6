"""Who may speak to the front end between nodes: those with this launch's keys, and nobody else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from moed.server.channel import FrontendChannel, connect, node_identity
from moed.server.messages import FromEngine, NodeBeat, RankProgress
from moed.server.wire import Wire, frontend_keys

SECRET, OTHER = b"s" * 32, b"o" * 32
# A message of an engine, as it is on the wire.
PROGRESS = RankProgress(0, "loading")
BEAT = msgspec.msgpack.encode(NodeBeat(1, "stranger", [1], True))
# Longer than an honest message takes on loopback, many times.
NOTHING_S = 0.5


@contextlib.asynccontextmanager
async def front_end() -> AsyncIterator[tuple[FrontendChannel, Wire]]:
    listener = socket.create_server(("127.0.0.1", 0))
    wire = Wire(f"tcp://127.0.0.1:{listener.getsockname()[1]}", SECRET)
    channel = FrontendChannel(wire, listener.detach(), 0)
    try:
        yield channel, wire
    finally:
        channel.close()


@contextlib.asynccontextmanager
async def dealer(wire: Wire, identity: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context(io_threads=1)
    link = context.socket(zmq.DEALER)
    connect(link, wire, identity)
    try:
        yield link
    finally:
        link.close(0)
        context.term()


async def assert_serves(channel: FrontendChannel, wire: Wire) -> None:
    """One that has the keys is heard, first and alone."""
    async with dealer(wire, b"rank-0-0") as link:
        await link.send(msgspec.msgpack.encode(PROGRESS))
        heard: FromEngine = await asyncio.wait_for(channel.receive(), 10)
        assert heard == PROGRESS


async def assert_hears_nothing(channel: FrontendChannel) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.receive(), NOTHING_S)


@pytest.mark.parametrize("secret", [None, OTHER])
async def test_without_the_keys_nothing_is_heard(secret: bytes | None) -> None:
    """Neither without encryption nor with keys of another launch."""
    async with front_end() as (channel, wire):
        async with dealer(Wire(wire.address, secret), node_identity(1)) as link:
            await link.send(BEAT)
            await assert_hears_nothing(channel)
            assert not await link.poll(0)
        await assert_serves(channel, wire)


async def test_the_public_key_of_the_front_end_is_not_enough() -> None:
    async with front_end() as (channel, wire):
        context = zmq.asyncio.Context(io_threads=1)
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
        link.curve_serverkey = frontend_keys(SECRET).public
        link.connect(wire.address)
        try:
            await link.send(BEAT)
            await assert_hears_nothing(channel)
        finally:
            link.close(0)
            context.term()
        await assert_serves(channel, wire)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", b""],
)
async def test_garbage_changes_nothing(said: bytes) -> None:
    async with front_end() as (channel, wire):
        host, port = wire.address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await assert_hears_nothing(channel)
        await assert_serves(channel, wire)
        writer.close()


async def test_recorded_bytes_change_nothing() -> None:
    """All that an engine has sent, once more, on a connection of its own."""
    recorded = bytearray()
    async with front_end() as (channel, wire):
        host, port = wire.address.removeprefix("tcp://").split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind_reader, behind = await asyncio.open_connection(host, int(port))

            async def copy(
                source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: bool
            ) -> None:
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(65536):
                        if keep:
                            recorded.extend(data)
                        target.write(data)
                target.close()

            await asyncio.gather(copy(reader, behind, True), copy(behind_reader, writer, False))

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            between = server.sockets[0].getsockname()[1]
            await assert_serves(channel, Wire(f"tcp://127.0.0.1:{between}", SECRET))
        assert recorded
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(recorded))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await assert_hears_nothing(channel)
        writer.close()
        await assert_serves(channel, wire)


async def test_what_no_engine_sends_is_dropped() -> None:
    """Even with the keys: only typed messages are decoded."""
    async with front_end() as (channel, wire):
        async with dealer(wire, b"rank-1-0") as link:
            for payload in (b"", b"\xc1", msgspec.msgpack.encode({"type": "no such"})):
                await link.send(payload)
            await link.send_multipart([b"two", b"frames"])
            await assert_hears_nothing(channel)
        await assert_serves(channel, wire)
