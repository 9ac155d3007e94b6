"""Server-sent events, and work that ends when its client leaves."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moed.server.api.errors import ApiError, InternalError, envelope, to_api_error

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class ClientLeft(Exception):
    """The connection was closed before the answer was complete."""


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, cancelled as soon as the client leaves (then `ClientLeft` is raised).
    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await _cancel(task)
        await _cancel(watcher)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class EventStream(Response):
    """Sends what `events` yields, unless it is empty, a comment every 15 s of silence, and an error
    as the last event.

    `on_close` is always called at the end, even when the client left before the first event: a
    generator that was never started runs no `finally` of its own.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
        on_close: Callable[[], None],
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        """`error_event`: how clients of the route are told of an error."""
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        # A body of unknown length.
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._error_event = error_event
        self._keep_alive_s = keep_alive_s
        self._last_sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        except (ClientLeft, OSError):
            pass
        finally:
            self._on_close()

    async def _run(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await send({"type": "http.response.start", **head})
            async for body in self._events:
                if body:
                    await self._send(send, body)
        except (asyncio.CancelledError, OSError):
            raise
        except Exception as error:
            await self._send(send, self._error_event(streamed_error(error)))
        finally:
            await _cancel(keep_alive)
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        self._last_sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """Proxies close connections on which nothing moves, and clients give up."""
        loop = asyncio.get_running_loop()
        self._last_sent_at = loop.time()
        while True:
            await asyncio.sleep(self._last_sent_at + self._keep_alive_s - loop.time())
            if loop.time() - self._last_sent_at >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)


def streamed_error(error: Exception) -> ApiError:
    """The status has been sent already: an error can only be the last event."""
    mapped = to_api_error(error)
    if mapped is None:
        logger.error("a streamed answer failed", exc_info=error)
        mapped = InternalError("the server made a mistake; its log tells more")
    return mapped


def error_event(error: ApiError) -> bytes:
    return b"data: " + envelope(error) + b"\n\n"
