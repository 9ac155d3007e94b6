"""Everything that needs a GPU, in one run of at most 8 minutes.

    python -m tests.gpu.check [--json FILE] [--only SECTION ...]
    python -m tests.gpu.check --device cpu --tiny      (the same code, on any machine)

Sections, each in a process of its own and with its own bound, so that a failure hides no other:
kernels against references; a model's logits and a daemon's tokens against transformers; throughput
of the experts against the GPU's peak; decode steps with and without graphs.

Exit codes: 0 all checks passed; 1 a check failed, or a section did not finish; 2 there is no GPU.
"""

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.report import Report, Row, read_rows, text_of
from tests.gpu.setup import Setup

PASSED, FAILED, NO_GPU = 0, 1, 2
ROOT = Path(__file__).parents[2]
TOTAL_S = 470.0
LOG_LINES = 25


@dataclasses.dataclass(frozen=True)
class Section:
    """A module, or `module:name` of something in one, with `run(setup, report)`."""

    name: str
    module: str
    limit_s: float


SECTIONS = (
    Section("kernels", "tests.gpu.kernels", 150),
    Section("model", "tests.gpu.model", 120),
    Section("daemon", "tests.gpu.serving", 120),
    Section("speed", "tests.gpu.speed", 120),
    Section("decode", "tests.gpu.decode", 150),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one section."""

    section: str
    seconds: float
    rows: list[Row]
    failure: str
    """Why it did not finish; empty if it did."""
    log: str

    @property
    def passed(self) -> bool:
        return not self.failure and all(row.passed is not False for row in self.rows)


def run_sections(
    sections: Sequence[Section], setup: Setup, folder: Path, total_s: float = TOTAL_S
) -> list[Outcome]:
    """One after the other, each within its bound and all within `total_s`."""
    deadline = time.monotonic() + total_s
    outcomes = []
    for section in sections:
        limit_s = min(section.limit_s, deadline - time.monotonic())
        outcome = _run_section(section, setup, folder, limit_s)
        print(section_text(outcome), flush=True)
        outcomes.append(outcome)
    return outcomes


def _run_section(section: Section, setup: Setup, folder: Path, limit_s: float) -> Outcome:
    if limit_s <= 0:
        return Outcome(section.name, 0.0, [], "no time was left for it", "")
    rows, log = folder / f"{section.name}.json", folder / f"{section.name}.log"
    started = time.monotonic()
    environment = dict(os.environ)
    if setup.device == "cpu":
        # Read when triton is imported.
        environment["TRITON_INTERPRET"] = "1"
    words = [sys.executable, "-m", "tests.gpu.check", "--section", section.module]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*words, "--json", str(rows), *setup.arguments()],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            failure = "" if code == PASSED else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"was ended after {limit_s:.0f} s"
        finally:
            _end_session(process)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return Outcome(section.name, time.monotonic() - started, read_rows(rows), failure, tail)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """The section, and what it may have left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)


def section_text(outcome: Outcome) -> str:
    """Its part of the table."""
    lines = [f"{outcome.section} ({outcome.seconds:.0f} s)", *map(text_of, outcome.rows)]
    if outcome.failure:
        log = "\n".join(f"        {line}" for line in outcome.log.splitlines())
        lines.append(f"  FAIL  the section {outcome.failure}\n{log}")
    return "\n".join(lines) + "\n"


def run_here(module: str, setup: Setup, path: Path) -> int:
    """The one section that this process is for."""
    report = Report(path)
    try:
        name, _, within = module.partition(":")
        found = importlib.import_module(name)
        (getattr(found, within) if within else found).run(setup, report)
    except Exception:
        traceback.print_exc()
        return FAILED
    return PASSED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu-check.json")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code; see the top."""
    asked = parse(arguments)
    setup = Setup(asked.device, asked.tiny)
    if asked.section is not None:
        return run_here(asked.section, setup, asked.json)
    if setup.device == "cuda" and not setup.has_gpu():
        print(
            "no check was run: torch finds no CUDA device here (--device cpu --tiny runs the same "
            "code in small sizes)",
            file=sys.stderr,
        )
        return NO_GPU
    started = time.monotonic()
    print(setup.description() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [section for section in SECTIONS if section.name in asked.only]
        outcomes = run_sections(chosen, setup, Path(folder))
    failed = [outcome.section for outcome in outcomes if not outcome.passed]
    content = {
        "machine": setup.description(),
        "seconds": time.monotonic() - started,
        "failed": failed,
        "sections": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(content, indent=2))
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    print(f"{verdict}; {content['seconds']:.0f} s; written to {asked.json}")
    return FAILED if failed else PASSED


if __name__ == "__main__":
    sys.exit(main())
