"""Every answer names its request: the client's own `X-Request-Id`, or a new one."""

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moed.server.api.request_ids import SCOPE_KEY

HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class RequestId:
    """Only echoes: the id never names a request inside, so two clients may send the same one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        is_valid = VALID_ID.fullmatch(given) is not None
        scope[SCOPE_KEY] = given.decode("ascii") if is_valid else f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER.decode()] = scope[SCOPE_KEY]
            await send(message)

        await self._app(scope, receive, send_with_id)
