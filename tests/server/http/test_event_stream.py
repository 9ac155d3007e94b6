"""Server-sent events: comments that keep a silent connection open, errors as the last event."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from moed.server.api.event_stream import ClientLeft, EventStream, error_event, until_disconnect
from moed.server.engine_client import GenerationFailed


class Connection:
    """What an ASGI server passes to an application."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.left = asyncio.Event()
        self.closed = asyncio.Event()
        self.is_broken = False

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.is_broken:
            raise OSError("the connection is gone")
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


async def run(events: AsyncGenerator[bytes, None], connection: Connection) -> None:
    stream = EventStream(
        events, {}, keep_alive_s=0.05, on_close=connection.closed.set, error_event=error_event
    )
    await stream({"type": "http"}, connection.receive, connection.send)
    assert connection.closed.is_set()


async def test_silence_is_filled_with_comments() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.13)
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    connection = Connection()
    await run(events(), connection)
    comment = b": keep-alive\n\n"
    assert connection.sent == [comment, comment, b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_no_comments_while_events_flow() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(8):
            await asyncio.sleep(0.02)
            yield b"data: x\n\n"

    connection = Connection()
    await run(events(), connection)
    assert connection.sent == [b"data: x\n\n"] * 8 + [b""]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationFailed("rank 1 is gone"), b'"engine_error"'),
        (ValueError("secret"), b'"internal_error"'),
    ],
)
async def test_error_is_the_last_event(error: Exception, code: bytes) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    connection = Connection()
    await run(events(), connection)
    assert len(connection.sent) == 3
    assert connection.sent[1].startswith(b'data: {"error":') and code in connection.sent[1]
    assert b"secret" not in connection.sent[1]


async def test_events_are_closed_when_the_client_leaves() -> None:
    is_closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal is_closed
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(60)
        finally:
            is_closed = True

    connection = Connection()
    asyncio.get_running_loop().call_later(0.02, connection.left.set)
    await asyncio.wait_for(run(events(), connection), 1)
    assert is_closed and connection.sent == [b"data: 1\n\n"]


async def test_request_is_freed_when_not_even_the_head_could_be_sent() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: never\n\n"

    connection = Connection()
    connection.is_broken = True
    await run(events(), connection)  # and checks that it was closed
    assert connection.sent == []


async def test_work_ends_when_the_client_leaves() -> None:
    connection = Connection()
    asyncio.get_running_loop().call_later(0.02, connection.left.set)
    with pytest.raises(ClientLeft):
        await asyncio.wait_for(until_disconnect(connection.receive, asyncio.sleep(60)), 1)


async def test_work_that_fails_says_so() -> None:
    async def work() -> None:
        raise GenerationFailed("x")

    with pytest.raises(GenerationFailed):
        await until_disconnect(Connection().receive, work())
