"""The last net: an exception that nobody foresaw is logged in full and answered in one sentence."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moed.server.api.errors import InternalError, error_response
from moed.server.api.request_ids import SCOPE_KEY

logger = logging.getLogger(__name__)


class UnexpectedErrors:
    """Answers 500 where nothing was sent yet; otherwise lets the server cut the connection, so that
    no client takes half an answer for a whole one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if has_started:
                raise
            logger.exception("request %s %s failed", scope["method"], scope["path"])
            error = InternalError(
                "the server made a mistake; its log tells more under request id "
                f"{scope.get(SCOPE_KEY)}"
            )
            await error_response(error)(scope, receive, send)
