"""`moed healthcheck`: ask the daemon of this machine how it is, for Docker's HEALTHCHECK and for
scripts.
"""

import http.client
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from moed.config.cli import parse
from moed.config.errors import UsageError
from moed.config.settings import ServeSettings
from moed.server.command_words import CommandParser

DESCRIPTION = """\
Ask a daemon how it is: exit code 0 where the answer is good, 1 where it is not, or does not come.

Without URL, it is the daemon that the MOED_* variables and the file in MOED_CONFIG describe, such
as MOED_PORT: those that the daemon of the same container was started with.
"""
PROBES = {"ready": "/readyz", "live": "/livez", "started": "/startupz"}
DEFAULT_TIMEOUT_S = 3.0
EXIT_UNHEALTHY = 1
# A daemon that listens on all addresses is asked on this one.
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Target:
    """Where the daemon listens."""

    host: str
    port: int
    is_encrypted: bool


class ProbeReport(msgspec.Struct):
    """What all probes answer with, as far as it is told here."""

    status: str
    reason: str | None = None


def healthcheck(words: Sequence[str]) -> int:
    """Print one line; returns the exit code. Raises `UsageError` or `ConfigError`."""
    parser = CommandParser("healthcheck", DESCRIPTION)
    parser.add_argument("url", metavar="URL", nargs="?", help="such as http://127.0.0.1:8000")
    parser.add_argument(
        "--probe", choices=PROBES, default="ready", help="what to ask for (default: ready)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"bound on the answer (default: {DEFAULT_TIMEOUT_S:g} s)",
    )
    given = parser.parse_args(words)
    if not given.timeout > 0:
        parser.error(f"--timeout is {given.timeout:g}; it must be above 0")
    target = own_target() if given.url is None else target_of(given.url)
    is_good, text = ask(target, PROBES[given.probe], given.timeout)
    print(text)
    return 0 if is_good else EXIT_UNHEALTHY


def own_target() -> Target:
    """The daemon that the environment describes."""
    settings = parse(["serve"]).settings
    assert settings is not None
    return target_of_settings(settings)


def target_of_settings(settings: ServeSettings) -> Target:
    if settings.port == 0:
        raise UsageError("moed healthcheck: port is 0, any free one; give the daemon's URL")
    host = LOOPBACK_OF.get(settings.host, settings.host)
    return Target(host, settings.port, settings.ssl_keyfile is not None)


def target_of(url: str) -> Target:
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"moed healthcheck: URL is {url!r}: {error}") from None
    if scheme not in ("http", "https") or not host:
        raise UsageError(f"moed healthcheck: URL is {url!r}; it is http://HOST:PORT or https://…")
    return Target(host, port or (443 if scheme == "https" else 80), scheme == "https")


def ask(target: Target, path: str, timeout_s: float) -> tuple[bool, str]:
    """Whether the answer is good, and one line about it."""
    where = f"{target.host} port {target.port}"
    # Not through a proxy, which the environment may name: it is this machine.
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    if target.is_encrypted:
        # Asked for a sign of life and told no secret; its certificate names another host.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            target.host, target.port, timeout=timeout_s, context=context
        )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return False, f"no answer from {where}: {error or type(error).__name__}"
    finally:
        connection.close()
    try:
        report = msgspec.json.decode(body, type=ProbeReport)
    except msgspec.DecodeError:
        return False, f"{where} answered {answer.status}, and is not a daemon of moed"
    reason = f": {report.reason}" if report.reason else ""
    return answer.status == 200, f"{report.status}{reason}"
