"""How one setting is declared: its names, limits and help, as metadata of a dataclass field.

Plain dataclasses, so that `moed --help` needs neither pydantic nor torch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

METADATA_KEY = "option"
ENVIRONMENT_PREFIX = "MOED_"


@dataclass(frozen=True)
class Option:
    """What the command line, the environment, files and the help know of one setting."""

    help: str
    group: str
    common: bool = False
    """Shown by `--help`; the others by `--help=all`."""
    hidden: bool = False
    """In no help at all: for tests."""
    on_command_line: bool = True
    """False for secrets: other users of the machine can read command lines."""
    secret: bool = False
    """Never printed."""
    short: str | None = None
    aliases: tuple[str, ...] = ()
    """Other long names, in underscores: what users of other servers type."""
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other spellings of values, each with the choice it stands for."""
    unit: str | None = None
    """"tokens" and "bytes" take sizes such as 8k and 4GiB; "seconds" is for the help."""
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    shown_default: str | None = None
    """What the help says where the default is None."""


@dataclass(frozen=True)
class Setting:
    """One field of `ServeSettings`, with its type and its option."""

    name: str
    annotation: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.annotation is bool

    @property
    def is_list(self) -> bool:
        return bool(self.annotation == tuple[str, ...])

    @property
    def takes_auto(self) -> bool:
        """True where None stands for `auto`: a number that the start decides."""
        return self.annotation in (int | None, float | None)


def option(default: Any, help: str, *, group: str, **details: Any) -> Any:
    """A field of `ServeSettings`."""
    declared = Option(help=help, group=group, **details)
    return dataclasses.field(
        default=default, repr=not declared.secret, metadata={METADATA_KEY: declared}
    )


@cache
def settings_of(owner: type) -> Mapping[str, Setting]:
    """All settings of a settings class, by name, in their order."""
    hints = get_type_hints(owner)
    return {
        field.name: Setting(
            name=field.name,
            annotation=hints[field.name],
            default=field.default,
            option=field.metadata[METADATA_KEY],
        )
        for field in dataclasses.fields(owner)
    }
