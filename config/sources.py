"""Settings as they lie in the environment and in `--config` files, before validation."""

import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moed.config.errors import ConfigError
from moed.config.names import REMOVED_VARIABLES, refuse_removed, setting_of_key, setting_of_variable
from moed.config.options import ENVIRONMENT_PREFIX

if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader

logger = logging.getLogger(__name__)

# Kubernetes gives every pod variables for each service of its namespace. Those of services called
# `moed`, or `moed-something`, begin with our prefix.
SERVICE_LINK = re.compile(
    r"MOED_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
SERVICE_LINK_PORT = re.compile(r"MOED_(\w+_)?PORT")
URL = re.compile(r"[a-z]+://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable, and not the user."""
    if SERVICE_LINK.fullmatch(name):
        return True
    return bool(SERVICE_LINK_PORT.fullmatch(name) and URL.match(value))


def read_variables(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Settings from `MOED_*`: setting's name → (value, origin). An empty value is not set.

    Raises `ConfigError` for unknown names, and for two names of one setting.
    """
    for name in REMOVED_VARIABLES:
        if name in environment:
            refuse_removed(name.removeprefix("VLLM_").lower(), f"the environment variable {name}")
    links = []
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if is_service_link(variable, value):
            links.append(variable)
            continue
        setting = setting_of_variable(variable)
        if not value:
            if setting.option.secret:
                # Whoever asks for a key and has none to give would serve everybody.
                raise ConfigError(f"{variable} is set and empty: give it a key, or unset it")
            continue
        if setting.name in found:
            raise ConfigError(
                f"{found[setting.name][1]} and {variable} are two names of one setting: keep one"
            )
        given = _split(value) if setting.is_list else value
        found[setting.name] = (given, f"environment {variable}")
    if links:
        logger.warning("ignoring variables that Kubernetes sets for services: %s", ", ".join(links))
    return found


def _split(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def read_file(path: str) -> dict[str, tuple[Any, str]]:
    """Settings from a YAML (hence JSON) or TOML file: setting's name → (value, origin).

    Raises `ConfigError` for what cannot be read, unknown keys, and two names of one setting.
    """
    found: dict[str, tuple[Any, str]] = {}
    for key, value in _parse(path).items():
        setting = setting_of_key(str(key), path)
        if setting.name == "config":
            raise ConfigError(f"{path}: a config file cannot name another one (key {key!r})")
        if setting.name in found:
            raise ConfigError(f"{path}: {key!r} gives {setting.name} a second time: keep one")
        if value is None:
            continue
        found[setting.name] = (_from_file(value, setting.is_list), f"file {path}")
    return found


def _from_file(value: Any, is_list: bool) -> Any:
    if is_list and isinstance(value, str):
        return (value,)
    return tuple(value) if is_list and isinstance(value, list) else value


def _unique_keys(base: "type[SafeLoader]") -> "type[SafeLoader]":
    """A loader that refuses a key given twice, of which YAML's own takes the last in silence."""
    import yaml

    class Loader(base):  # type: ignore[valid-type, misc]
        def construct_mapping(self, node: "MappingNode", deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            for index, name in enumerate(names):
                if name in names[:index]:
                    mark = node.value[index][0].start_mark
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{name!r} is given twice: keep one", mark
                    )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Loader


def _parse(path: str) -> Mapping[Any, Any]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    try:
        if Path(path).suffix == ".toml":
            return tomllib.loads(text)
        content = yaml.load(text, _unique_keys(yaml.SafeLoader))
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be parsed: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"the config file {path} holds a {type(content).__name__}; it must hold settings, such "
            "as `port: 8000`"
        )
    return content
