"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    check: str
    verdict: Verdict
    found: str
    """What is there, with numbers."""
    fix: str = ""
    """The exact thing to do; empty when all is well."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARNING, found, fix)


def problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.PROBLEM, found, fix)
