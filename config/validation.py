"""From raw values of flags, variables and files to validated settings: the pydantic-settings model.

The model is generated from `ServeSettings`, one field per setting.
"""

import json
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from moed.config.errors import ConfigError
from moed.config.names import settings
from moed.config.options import Setting
from moed.config.settings import ServeSettings
from moed.config.sizes import parse_bytes, parse_tokens

Raw = Mapping[str, tuple[Any, str]]
"""Setting's name → (value as given, where it was given)."""


class LayeredSettings(BaseSettings):
    """Values in layers, the first wins: flags, environment, file; then the defaults."""

    model_config = SettingsConfigDict(extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        layers = init_settings.init_kwargs["layers"]
        return tuple(InitSettingsSource(settings_cls, layer) for layer in layers)


def validate(flags: Raw, variables: Raw, file: Raw) -> tuple[ServeSettings, Mapping[str, str]]:
    """Settings, and for each one that was given where the winning value came from.

    Raises `ConfigError` naming each wrong value, where it was given, and what is allowed.
    """
    layers = (flags, variables, file)
    origins = {name: origin for layer in reversed(layers) for name, (_, origin) in layer.items()}
    plain = [{name: value for name, (value, _) in layer.items()} for layer in layers]
    try:
        validated = _model()(layers=plain)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(entry, origins) for entry in error.errors())) from None
    values = {name: getattr(validated, name) for name in settings()}
    return ServeSettings(**values), MappingProxyType(origins)


@cache
def _model() -> Any:
    fields: dict[str, Any] = {
        name: (_annotation(setting), setting.default) for name, setting in settings().items()
    }
    return create_model("ServeSettingsModel", __base__=LayeredSettings, **fields)


def _annotation(setting: Setting) -> Any:
    option = setting.option
    kind: Any = setting.annotation
    if option.choices:
        kind = Literal[option.choices]
    if option.minimum is not None or option.maximum is not None:
        bounded = float if setting.annotation in (float, float | None) else int
        kind = Annotated[bounded, Field(ge=option.minimum, le=option.maximum, allow_inf_nan=False)]
        if setting.takes_auto:
            kind = kind | None
    return Annotated[kind, BeforeValidator(lambda value: _prepare(setting, value))]


def _prepare(setting: Setting, value: Any) -> Any:
    """What pydantic should see for a value as given: `auto` as None, sizes as numbers."""
    if isinstance(value, bool) and not setting.is_switch:
        # bool is an int to Python, but `port: true` is a slip.
        raise ValueError("must not be true or false")
    if setting.is_list:
        value = _from_json(value)
    if setting.is_list and "" in (value if isinstance(value, list | tuple) else [value]):
        raise ValueError("must not be empty")
    if setting.name == "num_threads" and value in (0, "0"):
        return None
    if isinstance(value, str):
        if setting.takes_auto and value == "auto":
            return None
        if setting.option.unit == "tokens":
            return parse_tokens(value)
        if setting.option.unit == "bytes":
            return parse_bytes(value)
        return setting.option.synonyms.get(value, value)
    if isinstance(value, int | float) and setting.annotation in (str, str | None):
        # YAML reads an unquoted revision such as 0123 as the number 83: the text is lost.
        raise ValueError("must be text: write it in quotes")
    return value


def _from_json(value: Any) -> Any:
    """`["a", "b"]` as one text, which some users of vLLM give, is the list."""
    if isinstance(value, tuple) and len(value) == 1 and str(value[0]).startswith("["):
        try:
            return tuple(json.loads(value[0]))
        except ValueError:
            raise ValueError('must be a list of names, such as a b or ["a", "b"]') from None
    return value


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    name = str(error["loc"][0])
    setting = settings()[name]
    given = "" if setting.option.secret else f" is {error['input']!r}"
    return f"{name} ({origins[name]}){given}: {_allowed(setting, error)}"


def _allowed(setting: Setting, error: Any) -> str:
    option = setting.option
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if option.choices:
        return "must be one of " + ", ".join(option.choices)
    if setting.is_switch:
        return "must be true or false"
    if setting.is_list:
        return "must be a name or a list of names"
    if setting.annotation in (str, str | None):
        return "must be text"
    kind = "a number" if setting.annotation in (float, float | None) else "a whole number"
    auto = ", or auto" if setting.takes_auto else ""
    return f"must be {kind}{_limits(setting)}{auto}"


def _limits(setting: Setting) -> str:
    minimum, maximum = setting.option.minimum, setting.option.maximum
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    return "" if maximum is None else f" of at most {maximum}"
