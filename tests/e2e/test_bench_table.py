"""The table of speeds: it runs on a small load, and what it keeps can be read back."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.table import Given, Table, keep, median_ratio

ROOT = Path(__file__).parents[2]


def given(peer: str | None) -> Given:
    return Given(
        "model", 100, peer, rounds=3, num_threads=2, scenarios=(), share=1.0, max_model_len=100
    )


def test_ratio_is_the_median_of_the_rounds() -> None:
    ours = [{"ttft_ms": {"p50": value}} for value in (10.0, 90.0, 30.0)]
    theirs = [{"ttft_ms": {"p50": value}} for value in (20.0, 30.0, 60.0)]
    # Ratios 0.5, 3 and 0.5; of the medians alone it would be 1.
    assert median_ratio(ours, theirs, "ttft_ms") == (30.0, 30.0, 0.5)
    assert median_ratio(ours, [], "ttft_ms") == (30.0, None, None)


def test_round_in_which_the_peer_served_nothing_counts_for_moed() -> None:
    figures = ("output_tokens_per_s", "ttft_ms")
    ours = [{figure: value for figure in figures} for value in (10.0, 30.0, 20.0)]
    theirs = [{figure: value for figure in figures} for value in (0.0, 0.0, 40.0)]
    assert median_ratio(ours, theirs, "output_tokens_per_s") == (20.0, 0.0, math.inf)
    assert median_ratio(ours, theirs, "ttft_ms") == (20.0, 0.0, 0.5)


def test_load_that_no_scenario_is_called_is_refused() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.table", "--only", "9 clients"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'9 clients'" in done.stderr and "'8 clients'" in done.stderr


def test_history_grows_by_a_line_with_ratios_or_own_figures(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    table = Table()
    table.line("with a peer", 300.0, 200.0, ">= 1.10")
    table.line("alone", 300.0, None, "")
    keep(table, given("/some/where/vllm"), "mid", history)
    keep(table, given(None), "mid", history)
    first, second = map(json.loads, history.read_text().splitlines())
    assert first["figures"] == {"with a peer": 1.5, "alone": 300.0}
    assert first["commit"] and first["machine"]
    assert (first["peer"], second["peer"]) == ("vllm", None)


@pytest.mark.slow
def test_table_of_the_bundled_model(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.table", "--model", "bundled"]
    command += ["--only", "1 client", "--rounds", "1", "--history", str(history)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "without --peer" in done.stdout
    figures = json.loads(history.read_text())["figures"]
    assert figures["1 client: tokens/s"] > 0
    assert figures["one agreement, 2 ranks, ms"] > 0
    assert not any(name.endswith("failed") for name in figures)
