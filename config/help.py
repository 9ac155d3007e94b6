"""The text of `moed --help`, generated from the settings."""

from moed.config.doctor_settings import DOCTOR, DoctorSettings
from moed.config.errors import EXIT_CODES
from moed.config.names import settings
from moed.config.options import Setting, settings_of
from moed.config.plan_settings import PLAN, PlanSettings
from moed.config.settings import GROUPS

USAGE = """\
moed serves Mixture-of-Experts models over many ranks, behind one OpenAI-compatible endpoint.

  moed serve -dp 2                          the bundled model over two ranks, on this machine
  moed serve Qwen/Qwen3-30B-A3B -dp 8       a model from the Hugging Face Hub
  moed plan MODEL -dp 8 [flags of serve]    memory of each rank and all that would be refused; a
                                            config.json is enough, without GPU or weights
  moed doctor [flags of serve]              what on this machine would break a launch, and its fix
  moed place http://HOST:PORT --copies 8    place experts by the load that a daemon has counted
  moed bench http://HOST:PORT               load on any OpenAI-compatible server
  moed healthcheck                          exit code 0 where the local daemon is ready, else 1
  moed config show [flags of serve]         every resolved value, and where it came from
  moed models                               the model families that are served
  moed version

usage: moed serve [MODEL] [flags]
"""

FOOTER = """
Each flag has a twin in the environment (--max-num-seqs: MOED_MAX_NUM_SEQS) and in the --config file
(max_num_seqs). Flags win over the environment, that over the file, that over the defaults.
Sizes: 8k is 8000, 8K is 8192; 4GiB, 512MiB. Switches: --name, --no-name.
"""
EXIT_CODE_LINES = "\nExit codes\n" + "".join(
    f"  {codes:<10}{meaning}\n" for codes, meaning in EXIT_CODES.items()
)
MORE = "moed --help=all shows all {count} flags.\n"

FLAG_WIDTH = 34


def help_text(everything: bool) -> str:
    """The common flags in their groups, or all of them."""
    shown = [setting for setting in settings().values() if _is_shown(setting, everything)]
    parts = [USAGE]
    for group in GROUPS:
        lines = [_entry(setting) for setting in shown if setting.option.group == group]
        if lines:
            parts.append(f"\n{group}\n" + "".join(lines))
    for group, owner in ((PLAN, PlanSettings), (DOCTOR, DoctorSettings)):
        own = settings_of(owner).values()
        parts.append(f"\n{group}\n" + "".join(_entry(setting) for setting in own))
    parts.extend((FOOTER, EXIT_CODE_LINES))
    if not everything:
        parts.append(MORE.format(count=num_flags()))
    return "".join(parts)


def num_flags() -> int:
    """Flags that a user can give, aliases and `--no-` forms not counted."""
    return sum(_is_shown(setting, everything=True) for setting in settings().values())


def _is_shown(setting: Setting, everything: bool) -> bool:
    option = setting.option
    if option.hidden or not option.on_command_line:
        return False
    return everything or option.common


def _entry(setting: Setting) -> str:
    left = "  " + _form(setting)
    right = f"{setting.option.help} ({_default(setting)})"
    lines = _wrap(right, 100 - FLAG_WIDTH)
    if len(left) > FLAG_WIDTH - 2:
        return "".join(f"{line}\n" for line in [left, *(" " * FLAG_WIDTH + line for line in lines)])
    first = f"{left:<{FLAG_WIDTH}}{lines[0]}\n"
    return first + "".join(" " * FLAG_WIDTH + line + "\n" for line in lines[1:])


def _form(setting: Setting) -> str:
    option = setting.option
    if setting.name == "model":
        return "MODEL, --model MODEL"
    if setting.is_switch:
        return setting.flag if option.group in (PLAN, DOCTOR) else f"--[no-]{setting.flag[2:]}"
    short = f"{option.short}, " if option.short else ""
    if option.choices and option.metavar is None:
        value = "|".join(option.choices)
    else:
        units = {"tokens": "TOKENS", "bytes": "SIZE", "seconds": "SECONDS"}
        value = option.metavar or units.get(option.unit or "", "N")
    return f"{short}{setting.flag} {value}"


def _default(setting: Setting) -> str:
    if setting.option.shown_default is not None:
        return f"default: {setting.option.shown_default}"
    default = setting.default
    if setting.is_switch:
        return "default: on" if default else "default: off"
    if setting.option.unit == "seconds":
        return f"default: {default:g} s"
    if setting.option.unit == "bytes":
        from moed.config.sizes import format_bytes

        return f"default: {format_bytes(default)}"
    if setting.is_list:
        return f"default: {' '.join(default)}"
    return f"default: {default}"


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
