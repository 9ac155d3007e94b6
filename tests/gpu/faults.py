"""Sections that go wrong, for the test of the check itself."""

import os
import signal
import time
from types import SimpleNamespace

from tests.gpu.report import Report
from tests.gpu.setup import Setup


def _raise(setup: Setup, report: Report) -> None:
    report.check("before", 1.0, 2.0)
    raise RuntimeError("out of order")


def _die(setup: Setup, report: Report) -> None:
    report.check("before", 1.0, 2.0)
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(setup: Setup, report: Report) -> None:
    report.check("before", 1.0, 2.0)
    time.sleep(600)


def _wrong(setup: Setup, report: Report) -> None:
    report.check("not a number", float("nan"), 2.0)
    with report.attempt("raised"):
        raise ValueError("odd\nmore")
    report.check("after", 2.0, 2.0)


def _good(setup: Setup, report: Report) -> None:
    report.measure("a figure", 3.5, "ms")
    report.holds("on a CPU", setup.device == "cpu" and setup.tiny)


raises, dies, hangs, wrong, good = (
    SimpleNamespace(run=run) for run in (_raise, _die, _hang, _wrong, _good)
)
