"""The `moed` command as a process: what it prints, and its exit codes."""

import re
import resource
import subprocess
import sys
from typing import Any

import pytest

from moed.config.other_commands import OWN_FLAGS


def moed(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moed.server", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_comes_at_once() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = moed("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0
    assert "--max-num-batched-tokens" in run.stdout
    # Processor time, which does not grow with what else runs on the machine; alone on it, the
    # clock says about the same.
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 0.5


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["serve", "--prot", "1"], 64, "did you mean --port?"),
        (["sevre"], 64, "did you mean serve?"),
        (["serve", "--clients", "8"], 64, "--clients belongs to `moed bench`"),
        (["serve", "--quick"], 64, "--quick belongs to `moed doctor`"),
        (["serve", "--json"], 64, "`moed bench` and `moed doctor` and `moed plan`"),
        (["plan", "--window"], 64, "--window belongs to `moed place`"),
        (["bench", "http://x", "--port=80"], 64, "--port belongs to `moed serve`"),
        (["healthcheck", "--ranks", "2"], 64, "--ranks belongs to `moed place`"),
        (["place", "x", "--nonsense"], 64, "unrecognized arguments: --nonsense"),
        (["serve", "--port", "x"], 78, "whole number"),
        (["serve", "--moe-dp-chunk-size", "1"], 78, "--max-num-batched-tokens"),
        (["serve", "--max-num-batched-tokens", "8", "--max-num-seqs", "16"], 78, "16"),
        (["config", "show", "./nowhere"], 65, "no such directory"),
    ],
)
def test_a_users_fault_is_one_line_and_an_exit_code(words: list[str], code: int, part: str) -> None:
    run = moed(*words)
    assert run.returncode == code
    assert part in run.stderr
    assert run.stderr.startswith("moed: ")
    assert len(run.stderr.splitlines()) == 1
    assert run.stdout == ""


@pytest.mark.parametrize("command", list(OWN_FLAGS))
def test_the_flags_of_other_commands_are_known(command: str) -> None:
    lines = re.findall(r"^ +(-.*)", moed(command, "--help").stdout.partition("options:")[2], re.M)
    found = {flag for line in lines for flag in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line)}
    assert found - {"-h", "--help"} == set(OWN_FLAGS[command])


def test_config_show(write_checkpoint: Any) -> None:
    run = moed("config", "show", str(write_checkpoint()), "-dp", "2")
    assert run.returncode == 0
    assert run.stderr == ""
    assert "flag -dp" in run.stdout
