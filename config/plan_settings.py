"""The settings that only `moed plan` has: the machine that is planned for, and the form of the
answer; and how settings of one command are read, before those of `moed serve`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from moed.config.errors import ConfigError, UsageError
from moed.config.options import Setting, option, settings_of
from moed.config.sizes import parse_bytes, parse_tokens

PLAN = "Only with moed plan"

Owner = TypeVar("Owner")


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What `moed plan` takes besides the flags of `moed serve`."""

    gpu_memory: int = option(
        80 * 2**30, "memory of each GPU", group=PLAN, common=True, unit="bytes", minimum=1
    )
    gpus_per_node: int = option(8, "GPUs of each node", group=PLAN, common=True, minimum=1)
    nnodes: int | None = option(
        None,
        "nodes, over which the ranks are spread evenly",
        group=PLAN,
        common=True,
        minimum=1,
        shown_default="as few as have a GPU for each rank",
    )
    json: bool = option(False, "print JSON instead of tables", group=PLAN, common=True)


def take_settings(owner: type[Owner], words: Sequence[str]) -> tuple[Owner, list[str]]:
    """A command's own settings, and the words that are left. A flag given twice: the last wins.

    Raises `UsageError` for a missing value, `ConfigError` for one that is not allowed.
    """
    flags = {each.flag: each for each in settings_of(cast(type, owner)).values()}
    found: dict[str, Any] = {}
    left: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        setting = flags.get("--" + flag[2:].replace("_", "-") if flag[:2] == "--" else "")
        if setting is None:
            left.append(word)
            continue
        if setting.is_switch:
            if has_value:
                raise UsageError(f"{flag} takes no value")
            found[setting.name] = True
            continue
        if not has_value:
            if not rest or rest[0].startswith("-"):
                raise UsageError(f"{flag} needs a value: {flag} N")
            value = rest.pop(0)
        found[setting.name] = _number(setting, flag, value)
    return owner(**found), left


def _number(setting: Setting, flag: str, text: str) -> int:
    parse = parse_bytes if setting.option.unit == "bytes" else parse_tokens
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{setting.name} (flag {flag}) is {text!r}: {error}") from None
    if value < 1:
        raise ConfigError(f"{setting.name} (flag {flag}) is {text!r}: must be at least 1")
    return value
