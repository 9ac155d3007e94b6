"""Who asks: what the guard has found out of a request, for the routes that care."""

from dataclasses import dataclass

from starlette.types import Scope

from moed.server.api.errors import Forbidden

SCOPE_KEY = "moed.caller"


@dataclass(frozen=True)
class Caller:
    """One client, by its key."""

    name: str
    """A digest of its API key, which tells keys apart and not what they are; empty without keys."""
    refusal: str | None
    """Why it may not do what only an administrator may; None: it may."""

    @property
    def is_admin(self) -> bool:
        return self.refusal is None

    def check_admin(self) -> None:
        """Raises `Forbidden`."""
        if self.refusal is not None:
            raise Forbidden(self.refusal)


def caller_of(scope: Scope) -> Caller:
    """Behind the guard, which has set it."""
    caller: Caller = scope[SCOPE_KEY]
    return caller
