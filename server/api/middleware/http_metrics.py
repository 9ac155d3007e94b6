"""Counts every answer for /metrics."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moed.server.http_metrics import HttpMetrics

# nginx's word for an answer that nobody waited for.
CLIENT_CLOSED_REQUEST = 499


class CountAnswers:
    """The outermost: what other middleware answers counts too."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status, num_received, num_sent = CLIENT_CLOSED_REQUEST, 0, 0

        async def counted_receive() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, num_sent
            if message["type"] == "http.response.body":
                num_sent += len(message.get("body", b""))
            else:
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            route = scope.get("route")
            self._metrics.on_answer(
                None if route is None else route.path,
                scope["method"],
                status,
                time.monotonic() - started,
                num_received,
                num_sent,
            )
