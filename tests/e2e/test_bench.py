"""`moed bench` against a real daemon."""

import json
import pathlib
import random

import pytest

from moed.config.errors import ConfigError, UsageError
from moed.server.bench.command import bench
from moed.server.bench.workload import Lengths, Load, Workload
from tests.daemon import Daemon

SMALL = ("-i", "10:30", "-o", "4:8", "--requests", "12", "--warm-up", "2")


def run(capsys: pytest.CaptureFixture[str], path: pathlib.Path, *words: str) -> list[dict]:  # type: ignore[type-arg]
    assert bench([*words, "--json", str(path)]) == 0
    rows: list[dict] = json.loads(path.read_text())["loads"]  # type: ignore[type-arg]
    table = capsys.readouterr().out
    assert all(row["load"] in table for row in rows)
    return rows


def test_closed_and_open_loops(
    daemon: Daemon, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for loads in (("--clients", "1,4"), ("--rates", "50,200")):
        before = daemon.metrics()
        rows = run(capsys, tmp_path / "found.json", daemon.url, *loads, *SMALL)
        assert [row["requests"] for row in rows] == [12, 12]
        for row in rows:
            assert row["failed"] == 0 and row["first_error"] is None
            assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"] <= row["e2e_ms"]["p99"]
            told = row["output_tokens_per_s"] * row["duration_s"]
            assert 12 * 4 - 1 <= told <= 12 * 8 + 1
        if loads[0] == "--clients":
            assert [row["most_open"] for row in rows] == [1, 4]
        after = daemon.metrics()
        name = "moed:generation_tokens_total"
        tokens = sum(after[name, rank] - before[name, rank] for rank in range(2))
        assert 2 * 12 * 4 <= tokens <= (2 * 12 + 2) * 8


def test_shared_prefix_is_shared(
    daemon: Daemon, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = daemon.metrics()
    words = (daemon.url, "--clients", "1", *SMALL, "--prefix-tokens", "64")
    run(capsys, tmp_path / "found.json", *words)
    after = daemon.metrics()
    name = "moed:prefix_cache_hits_total"
    assert sum(after[name, rank] - before[name, rank] for rank in range(2)) >= 10 * 64


def test_failed_requests_are_counted_and_told(
    daemon: Daemon, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [daemon.url, "--clients", "2", "--requests", "3", "-i", "100000", "--warm-up", "0"]
    assert bench(words) == 1
    assert "context" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="answers no request"):
        bench([daemon.url, "--model", "nobody"])


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ([], UsageError, "URL"),
        (["ftp://x"], UsageError, "http://"),
        (["http://127.0.0.1:9", "--clients", "0"], UsageError, "--clients"),
        (["http://127.0.0.1:9", "-i", "9:3"], UsageError, "--input-tokens"),
        (["http://127.0.0.1:9", "--requests", "0"], UsageError, "--requests is 0"),
        (["http://127.0.0.1:9", "--clients", "1", "--rates", "1"], UsageError, "not allowed"),
        (["http://127.0.0.1:9"], ConfigError, "cannot reach"),
    ],
)
def test_bad_command_lines(words: list[str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        bench(words)


def test_two_servers_get_the_same_and_two_loads_do_not() -> None:
    workload = Workload(Lengths(3, 9), Lengths(1, 5), 4, 100, seed=7)
    first, again, other = workload.asks(20, 1), workload.asks(20, 1), workload.asks(20, 2)
    assert first == again != other
    assert {tuple(ask.prompt[:4]) for ask in (*first, *other)} == {tuple(first[0].prompt[:4])}
    assert {len(ask.prompt) for ask in first} <= set(range(7, 14))
    assert Lengths.parse("5") == Lengths(5, 5)
    assert 5 <= Lengths.parse("5:6").draw(random.Random(0)) <= 6


def test_poisson_arrivals_keep_their_rate() -> None:
    times = Load(rate=50.0).arrivals(2000, seed=1)
    assert times[0] == 0 and times == sorted(times)
    # Five standard deviations of the mean gap.
    assert abs(times[-1] / 1999 - 1 / 50) < 5 / 50 / 1999**0.5
