"""Files of API keys: one a line, with empty lines and comments between them."""

from collections.abc import Sequence
from pathlib import Path

from moed.config.errors import ConfigError

COMMENT = "#"


def all_keys(given: Sequence[str], path: str | None) -> tuple[str, ...]:
    """The keys of the environment and of the file, each once. Raises `ConfigError`."""
    keys = [*given, *(() if path is None else read_keys(path))]
    return tuple(dict.fromkeys(keys))


def read_keys(path: str) -> tuple[str, ...]:
    """Raises `ConfigError` for a file that cannot be read or holds no key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API key file {path}: {error}") from error
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith(COMMENT)]
    if not keys:
        # Serving everybody is not what a person who names a key file wants.
        raise ConfigError(f"the API key file {path} holds no key; write one a line")
    return tuple(keys)
