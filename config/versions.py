"""Versions of what is installed."""

import platform
from importlib.metadata import PackageNotFoundError, version

COMPARED_PACKAGES = ("moed", "torch", "deep_ep")


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compared_versions() -> dict[str, str]:
    """What must be equal on all ranks, by name."""
    packages = {name: installed_version(name) or "none" for name in COMPARED_PACKAGES}
    return {**packages, "python": platform.python_version()}
