"""Requests that need the engines are refused while these start, drain or have failed; the others
are counted, so that a drain knows when the last answer has left.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moed.server.api.errors import Unavailable, error_response
from moed.server.api.probes import ALWAYS_ANSWERED
from moed.server.api.state import AppState
from moed.server.health import Phase

STARTING_RETRY_S = 5
# A restart behind the same address takes a moment.
STOPPED_RETRY_S = 10


class Availability:
    """Guards all routes but those that tell of the daemon itself."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        health = self._state.health
        if not health.takes_requests:
            await error_response(self._refusal())(scope, receive, send)
            return
        with self._state.open_requests:
            await self._app(scope, receive, send if health.is_ready else closing(send))

    def _refusal(self) -> Unavailable:
        health = self._state.health
        starting = health.phase is Phase.STARTING
        error = Unavailable(
            f"requests are not served now: {health.reason}",
            STARTING_RETRY_S if starting else STOPPED_RETRY_S,
            f"server_{health.phase.value}",
        )
        if not starting:
            error.headers["Connection"] = "close"
        return error


def closing(send: Send) -> Send:
    """Says that the connection ends with this answer: the next request is for another server."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        await send(message)

    return send_closing
