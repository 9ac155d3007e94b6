"""Which command a flag belongs to, for who gave it to another one."""

from collections.abc import Mapping

from moed.config.doctor_settings import DoctorSettings
from moed.config.options import settings_of
from moed.config.plan_settings import PlanSettings

# Of the commands that read their own words, all flags but --help.
OWN_FLAGS: Mapping[str, tuple[str, ...]] = {
    "place": ("--ranks", "--copies", "--window", "--output"),
    "bench": (
        *("--model", "--clients", "--rates", "--requests", "-i", "--input-tokens", "-o"),
        *("--output-tokens", "--prefix-tokens", "--warm-up", "--vocab", "--temperature"),
        *("--seed", "--timeout", "--json", "--plot"),
    ),
    "healthcheck": ("--probe", "--timeout"),
}


def owners_of(flag: str) -> list[str]:
    """The commands that take `flag`, but for those that take all of `moed serve`."""
    found = [name for name, flags in OWN_FLAGS.items() if flag in flags]
    for name, owner in (("plan", PlanSettings), ("doctor", DoctorSettings)):
        if flag in (setting.flag for setting in settings_of(owner).values()):
            found.append(name)
    return sorted(found)


def belongs_to(flag: str) -> str | None:
    """A sentence that says which commands take `flag`; None where none does."""
    owners = [f"`moed {name}`" for name in owners_of(flag)]
    return f"{flag} belongs to {' and '.join(owners)}" if owners else None
