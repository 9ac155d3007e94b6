"""API keys: everything is guarded but the probes."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from moed.server.api.errors import InvalidApiKey, error_response
from moed.server.api.probes import PROBE_PATHS


class ApiKeys:
    """Compares in constant time with every configured key; does nothing when there is none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = self._keys and scope["type"] == "http" and scope["path"] not in PROBE_PATHS
        if not guarded or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = InvalidApiKey(
            "no valid API key was given: send one as `Authorization: Bearer KEY` or as "
            "`x-api-key: KEY`",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # as Anthropic's protocol has it
        # No early exit: the time taken tells nothing about which key nearly matched.
        matches = [hmac.compare_digest(known, key.strip()) for known in self._keys]
        return any(matches)
