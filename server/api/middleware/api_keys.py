"""API keys: everything is guarded but the probes, and what governs the daemon by a key of its own.

| admin keys | API keys | who may govern |
| --- | --- | --- |
| some | any | an admin key, which also opens everything else |
| none | some | any API key |
| none | none | clients on this machine that no proxy or web page stands behind |
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from moed.server.api.callers import SCOPE_KEY, Caller
from moed.server.api.errors import ApiError, Forbidden, InvalidApiKey, error_response
from moed.server.api.probes import PROBE_PATHS

ADMIN_PREFIX = "/admin/"
ADMIN_PATHS = frozenset({"/server_info", "/reset_prefix_cache"})
# Signs of somebody else behind a connection: a proxy, or a page in a browser on this machine.
FOREIGN_HEADERS = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin"))
NAME_CHARACTERS = 16


class ApiKeys:
    """Holds digests of the keys alone, and compares with every one of them in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._admin_keys = [_digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        found = self._identify(scope)
        if isinstance(found, Caller) and is_admin_path(scope["path"]) and not found.is_admin:
            found = Forbidden(found.refusal or "")
        if isinstance(found, ApiError):
            await error_response(found)(scope, receive, send)
            return
        scope[SCOPE_KEY] = found
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller | ApiError:
        headers = dict(scope["headers"])
        given = _digest(_given_key(headers))
        # No early exit: the time taken tells nothing about which key nearly matched.
        is_known = _is_among(given, self._keys)
        is_admin = _is_among(given, self._admin_keys)
        needs_key = bool(self._keys) or (bool(self._admin_keys) and is_admin_path(scope["path"]))
        if not is_known and not is_admin and needs_key:
            return InvalidApiKey(
                "no valid API key was given: send one as `Authorization: Bearer KEY` or as "
                "`x-api-key: KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
        name = given.hex()[:NAME_CHARACTERS] if is_known or is_admin else ""
        return Caller(name, None if is_admin else self._refusal(scope, headers))

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
        """Why a caller without an admin key may not govern; None: it may."""
        if self._admin_keys:
            return "this needs an admin key (--admin-api-key-file), and another was given"
        if self._keys or (_is_local(scope) and not FOREIGN_HEADERS & headers.keys()):
            return None
        return (
            "without any key set, this answers only to clients on the server's own machine, not "
            "through a proxy or from a web page; to use it from elsewhere, start the server with "
            "--admin-api-key-file or MOED_ADMIN_API_KEY"
        )


def is_admin_path(path: str) -> bool:
    """True for routes that govern the daemon, or tell how it was set up."""
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_PATHS


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")  # as Anthropic's protocol has it
    return key.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_among(given: bytes, known: Sequence[bytes]) -> bool:
    return any([hmac.compare_digest(given, digest) for digest in known])


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
