"""HEAD is answered wherever GET is: with the same head, and no body."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """Routes see a GET; the server below, which knows better, sends no body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
