"""Checks of where spans go, before anything starts."""

from urllib.parse import urlsplit

from moed.config.errors import ConfigError
from moed.config.machine import is_installed

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def traces_endpoint(given: str | None) -> str | None:
    """`given`, if spans can go there. Raises `ConfigError`."""
    if given is None:
        return None
    if not given.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint is {given!r}: it takes OTLP over HTTP, an address such as "
            "http://collector:4318/v1/traces"
        )
    if "@" in urlsplit(given).netloc:
        raise ConfigError(
            "otlp_traces_endpoint holds a name or a password, which would show where settings are "
            "shown: leave them out, and set OTEL_EXPORTER_OTLP_HEADERS"
        )
    if missing := [name for name in PACKAGES if not is_installed(name)]:
        raise ConfigError(
            f"otlp_traces_endpoint is set, and {missing[0]} is not installed: "
            "pip install 'moed[otel]', or leave it unset"
        )
    return given
