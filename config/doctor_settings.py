"""The settings that only `moed doctor` has."""

from dataclasses import dataclass

from moed.config.options import option

DOCTOR = "Only with moed doctor"


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What `moed doctor` takes besides the flags of `moed serve`."""

    nnodes: int = option(1, "nodes of the launch", group=DOCTOR, minimum=1)
    quick: bool = option(
        False, "leave out what loads torch: its build, NCCL, deep_ep", group=DOCTOR
    )
    json: bool = option(False, "print JSON instead of a page", group=DOCTOR)
