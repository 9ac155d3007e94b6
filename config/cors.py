"""Which web pages may call the server from a browser (CORS); none unless asked."""

import re
from dataclasses import dataclass

from moed.config.errors import ConfigError
from moed.config.settings import ServeSettings

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclass(frozen=True)
class CorsConfig:
    """What browsers are told."""

    allowed_origins: tuple[str, ...]
    allow_credentials: bool
    allowed_methods: tuple[str, ...]
    allowed_headers: tuple[str, ...]


def cors_config(settings: ServeSettings) -> CorsConfig | None:
    """None when no page may. Raises `ConfigError`."""
    origins = settings.allowed_origins
    if not origins:
        if settings.allow_credentials:
            raise ConfigError(
                "allow_credentials is on and allowed_origins is empty: name the pages that may "
                "send them, with --allowed-origins https://HOST"
            )
        return None
    for origin in origins:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed_origins holds {origin!r}; an origin is written https://host or "
                "http://host:port, with no path, and * stands for all"
            )
    if settings.allow_credentials and ANY in origins:
        raise ConfigError(
            "allow_credentials is on and allowed_origins holds *: every page of the web could then "
            "act with its visitors' credentials; name the origins, or leave out one of the two"
        )
    return CorsConfig(
        allowed_origins=origins,
        allow_credentials=settings.allow_credentials,
        allowed_methods=tuple(method.upper() for method in settings.allowed_methods),
        allowed_headers=settings.allowed_headers,
    )
