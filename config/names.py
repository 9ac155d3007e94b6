"""From the names that people write to settings: aliases, removed settings, suggestions."""

import difflib
from collections.abc import Iterable
from functools import cache

from moed.config.errors import ConfigError, UsageError
from moed.config.options import ENVIRONMENT_PREFIX, Setting, settings_of
from moed.config.other_commands import belongs_to
from moed.config.settings import ServeSettings

# Settings of a design that split steps into chunks inside the MoE layer.
REMOVED = ("enable_moe_dp_chunk", "disable_moe_dp_chunk", "moe_dp_chunk_size")
REMOVED_VARIABLES = tuple(f"VLLM_{name.upper()}" for name in REMOVED)


@cache
def settings() -> dict[str, Setting]:
    """Every setting by name."""
    return dict(settings_of(ServeSettings))


@cache
def names() -> dict[str, str]:
    """Every name that a setting goes by, aliases included → the setting's name."""
    found = {name: name for name in settings()}
    for name, setting in settings().items():
        found.update(dict.fromkeys(setting.option.aliases, name))
    return found


def refuse_removed(name: str, as_written: str) -> None:
    """Raises `ConfigError` when `name` (in underscores) belongs to the removed chunking."""
    if name.removeprefix("no_") in REMOVED:
        raise ConfigError(
            f"{as_written} was removed: no step runs more than max_num_batched_tokens tokens per "
            "rank, so the MoE layer never splits one. Remove it, and limit a step with "
            "--max-num-batched-tokens"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for a near miss, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def setting_of_key(key: str, source: str) -> Setting:
    """The setting that a file's key names, hyphens allowed. Raises `ConfigError`."""
    name = key.replace("-", "_")
    refuse_removed(name, f"{key!r} in {source}")
    found = names().get(name)
    if found is None or settings()[found].option.hidden:
        raise ConfigError(f"{source}: unknown setting {key!r}{did_you_mean(name, visible_names())}")
    return settings()[found]


def visible_names() -> list[str]:
    """All names but those for tests."""
    return [alias for alias, name in names().items() if not settings()[name].option.hidden]


def setting_of_variable(variable: str) -> Setting:
    """The setting that `MOED_X` names. Raises `ConfigError`."""
    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    refuse_removed(name, f"the environment variable {variable}")
    found = names().get(name)
    if found is None:
        known = [ENVIRONMENT_PREFIX + alias.upper() for alias in visible_names()]
        raise ConfigError(
            f"unknown environment variable {variable}{did_you_mean(variable, known)} "
            f"(names that begin with {ENVIRONMENT_PREFIX} are read as settings; "
            "`moed --help=all` lists them)"
        )
    return settings()[found]


@cache
def flags() -> dict[str, tuple[str, bool]]:
    """Every flag as typed → (setting's name, value of a switch). `--no-x` stands for x = false."""
    found: dict[str, tuple[str, bool]] = {}
    for alias, name in names().items():
        setting = settings()[name]
        if setting.option.hidden or not setting.option.on_command_line:
            continue
        flag = "--" + alias.replace("_", "-")
        found[flag] = (name, True)
        if setting.is_switch:
            found["--no-" + flag[2:]] = (name, False)
        if setting.option.short:
            found[setting.option.short] = (name, True)
    return found


def setting_of_flag(flag: str) -> tuple[Setting, bool]:
    """The setting behind a flag, and what a switch says. Raises `UsageError` or `ConfigError`."""
    written = flag if not flag.startswith("--") else "--" + flag[2:].replace("_", "-")
    if written in flags():
        name, positive = flags()[written]
        return settings()[name], positive
    name = written.lstrip("-").replace("-", "_")
    refuse_removed(name, flag)
    hidden = names().get(name)
    if hidden is not None and settings()[hidden].option.secret:  # `…_keys`, with a `…_key_file`
        raise UsageError(
            f"{flag} is not taken from the command line, which other users of this machine can "
            f"read: set MOED_{name.upper()}, or give --{hidden[:-1].replace('_', '-')}-file FILE"
        )
    if (hint := belongs_to(written)) is not None:
        raise UsageError(f"{hint}, not to this command")
    near = did_you_mean(written, flags())
    raise UsageError(f"unknown flag {flag}{near} (`moed --help=all` lists all flags)")
