"""The command line: `moed serve`, `plan`, `doctor`, `place`, `bench`, `models`, `config show`, …

Written out rather than left to a library: it starts in a few milliseconds, takes flags as vLLM
users type them, and can say exactly what is wrong.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moed.config.doctor_settings import DoctorSettings
from moed.config.environ import environment
from moed.config.errors import UsageError
from moed.config.help import help_text
from moed.config.names import did_you_mean, setting_of_flag
from moed.config.plan_settings import PlanSettings, take_settings
from moed.config.settings import ServeSettings

COMMANDS = (
    *("serve", "plan", "doctor", "place", "bench", "healthcheck", "models", "config show"),
    "version",
)
# These read the words that follow by themselves.
OWN_WORDS = ("place", "bench", "healthcheck")

_NUMBER = re.compile(r"-\d")


@dataclass(frozen=True)
class Command:
    """What the user asked for."""

    name: str
    """One of `COMMANDS`, or "help"."""
    settings: ServeSettings | None = None
    """For `serve`, `plan`, `doctor` and `config show`."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each given setting came from; absent: its default."""
    text: str = ""
    """For "help": what to print."""
    plan: PlanSettings | None = None
    """For `plan`: the settings that it alone has."""
    doctor: DoctorSettings | None = None
    """As `plan`, for `doctor`."""
    words: Sequence[str] = ()
    """For `OWN_WORDS`: what follows."""


def parse(argv: Sequence[str]) -> Command:
    """Read the command line (without the program's name), environment and config file.

    Raises `UsageError` (exit 64) for a command line that cannot be read, `ConfigError` for values.
    """
    words = list(argv)
    if not words or words[0] == "help":
        return Command("help", text=help_text(everything=False))
    if words[0] in OWN_WORDS:
        return Command(words[0], words=words[1:])
    for word in words:
        if word in ("-h", "--help", "--help=all"):
            return Command("help", text=help_text(everything=word == "--help=all"))
        if word.startswith("--help="):
            raise UsageError(f"{word}: there are --help and --help=all")
    if words[0] in ("version", "--version", "-V"):
        if words[1:]:
            raise UsageError(f"`moed version` takes nothing more, not {words[1]!r}")
        return Command("version")
    if words[0] == "models":
        if words[1:]:
            raise UsageError(f"`moed models` takes nothing more, not {words[1]!r}")
        return Command("models")
    if words[0] == "serve":
        return _with_settings("serve", words[1:])
    if words[0] == "plan":
        plan, rest = take_settings(PlanSettings, words[1:])
        return replace(_with_settings("plan", rest), plan=plan)
    if words[0] == "doctor":
        doctor, rest = take_settings(DoctorSettings, words[1:])
        return replace(_with_settings("doctor", rest), doctor=doctor)
    if words[:2] == ["config", "show"]:
        return _with_settings("config show", words[2:])
    if words[0] == "config":
        raise UsageError("`moed config` has one command: `moed config show`")
    near = did_you_mean(words[0], COMMANDS) or "; did you mean `moed serve`?"
    raise UsageError(f"unknown command {words[0]!r}{near} (`moed --help` shows how to begin)")


def _with_settings(name: str, words: Sequence[str]) -> Command:
    flags = read_flags(words)
    # None of these imports is needed for help; pydantic's takes longer than all the rest.
    from moed.config.sources import read_file, read_variables
    from moed.config.validation import validate

    variables = read_variables(environment())
    path = flags.get("config") or variables.get("config")
    file = read_file(str(path[0])) if path else {}
    settings, origins = validate(flags, variables, file)
    return Command(name, settings=settings, origins=origins)


def read_flags(words: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Setting's name → (value as given, the flag). A flag given twice: the last wins; a list flag
    collects.

    Raises `UsageError` for unknown flags and missing values.
    """
    found: dict[str, tuple[Any, str]] = {}
    rest = list(words)
    collecting: str | None = None
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            # `MODEL --served-model-name a b` names two, as elsewhere; without a MODEL before it, b
            # is the MODEL.
            if collecting is not None and "model" in found:
                found[collecting] = ((*found[collecting][0], word), found[collecting][1])
                continue
            if "model" in found:
                raise UsageError(
                    f"unexpected {word!r}: MODEL is given already as {found['model'][0]!r}"
                )
            found["model"] = (word, "flag MODEL")
            collecting = None
            continue
        collecting = None
        flag, has_value, value = word.partition("=")
        setting, positive = setting_of_flag(flag)
        origin = f"flag {flag}"
        if setting.is_switch:
            found[setting.name] = (_switch(flag, has_value, value, positive), origin)
            continue
        if not has_value:
            if not rest or _is_flag(rest[0]):
                raise UsageError(
                    f"{flag} needs a value: {flag} {setting.option.metavar or 'VALUE'}"
                )
            value = rest.pop(0)
        if setting.is_list:
            collecting = setting.name
            earlier = found[setting.name][0] if setting.name in found else ()
            found[setting.name] = ((*earlier, value), origin)
        else:
            found[setting.name] = (value, origin)
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _switch(flag: str, has_value: str, value: str, positive: bool) -> Any:
    if not has_value:
        return positive
    if not positive:
        raise UsageError(f"{flag} takes no value")
    return value
