"""What torchrun gives its workers to leave, read as torchrun reads it, and what a drain takes."""

import subprocess
import sys

import pytest

from moed.dist.torchrun_patience import LEAVING_S, longest_drain_s, patience_s

AGENT = ["python", "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ([], (None, None), 30),
        (["--shutdown-timeout", "60"], (None, None), 60),
        (["--shutdown_timeout=45"], ("7", "8"), 45),
        (["--shutdown-t", "12"], (None, None), 12),
        (["--shutdown-timeout", "1", "--shutdown-timeout", "2"], (None, None), 2),
        (["--standalone", "--start-method", "spawn"], (None, "90"), 90),
        ([], ("20", "90"), 20),
        # What torchrun itself would not have started with.
        (["--shutdown-timeout", "soon"], (None, None), 30),
        (["--shutdown-timeout"], (None, None), 30),
    ],
)
def test_patience(words: list[str], variables: tuple[str | None, ...], expected: float) -> None:
    assert patience_s([*AGENT, *words], variables) == expected


@pytest.mark.parametrize("words", [["--shutdown-t", "12"], ["--shutdown_timeout=12"], []])
def test_torchrun_reads_it_so(words: list[str]) -> None:
    """The abbreviation, the other spelling and the default, by torch's own parser."""
    code = (
        "import sys; from torch.distributed.run import get_args_parser, config_from_args\n"
        "args = get_args_parser().parse_args(sys.argv[1:])\n"
        "print(config_from_args(args)[0].shutdown_timeout)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words, "script.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) == patience_s([*AGENT, *words], (None, None))


@pytest.mark.parametrize("given_s", [0, 1, 5, 8, 30, 600])
def test_a_drain_leaves_time_to_leave(given_s: float) -> None:
    longest_s = longest_drain_s(given_s)
    assert given_s - longest_s == min(LEAVING_S, given_s / 2)
