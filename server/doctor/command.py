"""`moed doctor`: all checks, as one page or as JSON."""

import socket
import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from moed.config import environ
from moed.config.doctor_settings import DoctorSettings
from moed.config.machine import available_memory_bytes
from moed.config.settings import ServeSettings
from moed.server.doctor import gpu_checks, host_checks, launch_checks
from moed.server.doctor.asked import ask
from moed.server.doctor.finding import Finding, Verdict
from moed.server.doctor.libraries import load_libraries
from moed.server.doctor.readings import take_readings

EXIT_PROBLEMS = 1
WIDTH = 110
MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM"}


def doctor(settings: ServeSettings, own: DoctorSettings) -> int:
    """Print the findings; returns 1 where one of them is a problem, else 0."""
    findings = list(examine(settings, own))
    print(as_json(findings) if own.json else as_text(findings), end="")
    return EXIT_PROBLEMS if any(f.verdict is Verdict.PROBLEM for f in findings) else 0


def examine(settings: ServeSettings, own: DoctorSettings) -> Iterator[Finding]:
    """All findings for a launch with these settings, on this machine."""
    asked, refusal = ask(settings, own.nnodes)
    seen = take_readings()
    loaded = None if own.quick else load_libraries()
    libraries = None if isinstance(loaded, str) else loaded
    yield from launch_checks.settings(refusal)
    yield from launch_checks.model(asked)
    yield from launch_checks.port(asked)
    yield from launch_checks.addresses(seen, asked, environ.environment(), own_address())
    yield from launch_checks.temporary_folder()
    yield from gpu_checks.driver(seen, asked, libraries)
    if loaded is not None:
        yield from gpu_checks.torch_build(asked, loaded)
        yield from gpu_checks.nccl(asked, libraries)
        yield from gpu_checks.deep_ep(asked, libraries)
    yield from gpu_checks.infiniband(seen, asked)
    yield from host_checks.shared_memory(seen, asked)
    yield from host_checks.locked_memory(seen, asked)
    yield from host_checks.open_files(seen, asked)
    yield from host_checks.processes(seen, asked)
    yield from host_checks.processors(seen, asked, environ.available_cores())
    yield from host_checks.memory(asked, available_memory_bytes())
    yield from host_checks.huge_pages(seen, asked)
    yield from host_checks.clock(seen, asked)


def own_address() -> str | None:
    """What this machine's name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, with its fix below, and a sum."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{MARKS[finding.verdict]:<8}{finding.check:<{width}}  "
        lines += _wrapped(head, " " * len(head), finding.found)
        if finding.fix:
            start = " " * (len(head) - len("fix: ")) + "fix: "
            lines += _wrapped(start, " " * len(head), finding.fix)
    counts = {
        verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict
    }
    lines.append(
        f"\n{counts[Verdict.PROBLEM]} problem(s), {counts[Verdict.WARNING]} warning(s), "
        f"{counts[Verdict.OK]} in order"
    )
    return "\n".join(lines) + "\n"


def _wrapped(first: str, other: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(findings: Sequence[Finding]) -> str:
    return msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n"
