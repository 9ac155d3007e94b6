"""From a started generation to its HTTP answer: a stream of events, or one whole body."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.errors import ApiError
from moed.server.api.event_stream import (
    KEEP_ALIVE_S,
    EventStream,
    error_event,
    until_disconnect,
)
from moed.server.api.generation import Generation
from moed.server.engine_client import RequestTimedOut


async def respond(
    request: Request,
    start: Coroutine[Any, Any, Generation],
    events: Callable[[Generation], AsyncGenerator[bytes, None]] | None,
    whole: Callable[[Generation], Response],
    timeout_s: float | None,
    error_event: Callable[[ApiError], bytes] = error_event,
) -> Response:
    """Answer with `events` as they come, or, where it is None, with `whole` at the end; with an
    error when that takes longer than `timeout_s`.

    Raises `ClientLeft` when the client goes away before the answer begins; what was started is
    freed then.
    """
    start = started_in_time(start, timeout_s)
    if events is not None:
        generation = await until_disconnect(request.receive, start)
        return EventStream(
            events(generation),
            generation.ignored.headers,
            keep_alive_s=KEEP_ALIVE_S,
            on_close=generation.close,
            error_event=error_event,
        )

    async def answer() -> Response:
        generation = await start
        await generation.collect()
        return whole(generation)

    return await until_disconnect(request.receive, answer())


async def started_in_time(
    start: Coroutine[Any, Any, Generation], timeout_s: float | None
) -> Generation:
    """What `start` starts, to be ended by the same time. Raises `RequestTimedOut`."""
    if timeout_s is None:
        return await start
    deadline = asyncio.get_running_loop().time() + timeout_s
    timer = asyncio.timeout_at(deadline)
    try:
        async with timer:
            generation = await start
    except TimeoutError:
        if timer.expired():
            raise RequestTimedOut(timeout_s) from None
        raise
    generation.fail_at(deadline, RequestTimedOut(timeout_s))
    return generation
