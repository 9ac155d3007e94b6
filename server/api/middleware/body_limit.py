"""Request bodies have a largest size and a longest time to arrive."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moed.server.api.errors import ApiError, BodyTimeout, BodyTooLarge, error_response

# From the headers to the last byte of the body.
BODY_TIMEOUT_S = 60.0


class BodyLimit:
    """Refuses by the announced length at once, and by what really arrives while it does."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((v for name, v in scope["headers"] if name == b"content-length"), b"")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout(
                    f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s",
                    headers={"Connection": "close"},
                ) from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return BodyTooLarge(
            f"the request's body is larger than {self._max_bytes} bytes, the most that this server "
            "takes",
            # What still arrives of the body will not be read.
            headers={"Connection": "close"},
        )
