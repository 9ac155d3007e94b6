"""The GPU check itself, on a CPU: whole, and with sections that go wrong."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from tests.gpu import check
from tests.gpu.check import FAILED, NO_GPU, PASSED, Section, run_sections, section_text
from tests.gpu.setup import Setup

TINY = Setup("cpu", tiny=True)


def faulty(name: str, limit_s: float = 60.0) -> Section:
    return Section(name, f"tests.gpu.faults:{name}", limit_s)


def test_a_failure_hides_no_other(tmp_path: pathlib.Path) -> None:
    sections = [faulty("raises"), faulty("dies"), faulty("hangs", 4.0), faulty("wrong")]
    outcomes = run_sections([*sections, faulty("good")], TINY, tmp_path)
    raised, died, hung, wrong, good = outcomes
    assert raised.failure == "ended with exit code 1" and "out of order" in section_text(raised)
    assert died.failure == "ended with exit code -11"
    assert hung.failure == "was ended after 4 s" and hung.seconds < 20
    # What was found before the end is kept.
    assert [[row.name for row in outcome.rows] for outcome in outcomes[:3]] == [["before"]] * 3
    assert not wrong.failure and [row.passed for row in wrong.rows] == [False, False, True]
    assert "FAIL  raised" in section_text(wrong) and "ValueError: odd" in section_text(wrong)
    assert [outcome.passed for outcome in outcomes] == [False, False, False, False, True]
    assert [row.passed for row in good.rows] == [None, True]


def test_all_sections_share_one_bound(tmp_path: pathlib.Path) -> None:
    first, second = run_sections([faulty("hangs"), faulty("good")], TINY, tmp_path, total_s=3.0)
    assert first.failure == "was ended after 3 s"
    assert second.failure == "no time was left for it" and not second.passed


def run_tiny(path: pathlib.Path, *words: str) -> tuple[str, list[str]]:
    """What is printed, and the names of the sections in the file."""
    command = (sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--tiny")
    done = subprocess.run(
        [*command, "--json", path, *words],
        cwd=check.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == PASSED, done.stdout
    content = json.loads(path.read_text())
    assert content["failed"] == []
    for section in content["sections"]:
        assert section["rows"], section
    return done.stdout, [section["section"] for section in content["sections"]]


def test_it_runs_on_a_cpu(tmp_path: pathlib.Path) -> None:
    words = ("kernels", "speed", "decode")
    text, sections = run_tiny(tmp_path / "deeper" / "found.json", "--only", *words)
    assert sections == list(words)
    for line in ("TritonExperts", "sdpa H=4 G=2 d=16 decodes", "TFLOP/s", "eager over graphs"):
        assert line in text
    assert "all checks passed" in text


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path: pathlib.Path) -> None:
    _, sections = run_tiny(tmp_path / "found.json")
    assert sections == [section.name for section in check.SECTIONS]


def test_exit_codes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == NO_GPU
    assert capsys.readouterr().err.startswith("no check was run: torch finds no CUDA device here")

    def asked(sections: Sequence[Section]) -> int:
        monkeypatch.setattr(check, "SECTIONS", tuple(sections))
        return check.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "found.json")])

    assert asked([faulty("good")]) == PASSED
    assert asked([faulty("wrong"), faulty("good")]) == FAILED
    assert json.loads((tmp_path / "found.json").read_text())["failed"] == ["wrong"]
    assert "failed: wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check.main(["--help"])
    assert "2 there is no GPU" in " ".join(capsys.readouterr().out.split())
