"""A process that is lost costs no request anything: what is open goes on, token by token."""

import os
import re
import signal
import time

import httpx
import pytest

from tests.daemon import Daemon
from tests.e2e.streams import (
    KINDS,
    LONG,
    PROMPT,
    Stream,
    assert_same,
    await_growth,
    await_status,
    finish,
    kill,
    start_all,
)

RECOVERY_S = 60.0


def undisturbed(daemon: Daemon) -> list[Stream]:
    streams = start_all(daemon)
    for stream in streams:
        stream.join()
    assert all(choice.token_ids for stream in streams for choice in stream.choices.values())
    return streams


def await_loss(daemon: Daemon, num_losses: int) -> None:
    """Until the launcher has seen as many."""
    deadline = time.monotonic() + 10
    while daemon.log.count("Forming the group anew") < num_losses:
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.005)


def assert_well(daemon: Daemon) -> None:
    """Serving, at rest, and all ranks have made the same steps."""
    daemon.wait_ready()
    daemon.assert_alive()
    steps = {value for (name, _), value in daemon.metrics().items() if "engine_steps" in name}
    assert len(steps) == 1, steps


def test_a_killed_rank_costs_no_request_anything() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        expected = undisturbed(daemon)
        front_end, survivor = daemon.pid("http"), daemon.pid("rank-0")
        streams = start_all(daemon)
        await_growth(streams, 8)
        kill(daemon, "rank-1")
        await_loss(daemon, 1)
        report = httpx.get(f"{daemon.url}/readyz", timeout=5)
        assert report.status_code == 503 and report.json()["status"] == "recovering"
        assert "rank 1 ended" in report.json()["reason"]
        late = Stream(daemon, KINDS["greedy"])
        for stream in [*streams, late]:
            stream.join(RECOVERY_S)
        assert_same([*streams, late], [*expected, expected[0]])
        assert_well(daemon)
        # Nothing but the one rank was started again.
        assert (daemon.pid("http"), daemon.pid("rank-0")) == (front_end, survivor)
        assert daemon.metrics()["moed:rank_losses_total", 1] == 1


def test_a_stopped_rank_is_named_and_ended() -> None:
    with Daemon("--step-timeout", "2") as daemon:
        daemon.wait_ready()
        expected = undisturbed(daemon)
        streams = start_all(daemon)
        await_growth(streams, 8)
        stopped = daemon.pid("rank-1")
        os.kill(stopped, signal.SIGSTOP)
        await_status(daemon, "stalled")
        reason = httpx.get(f"{daemon.url}/readyz", timeout=5).json()["reason"]
        assert f"rank 1 (process {stopped}), stopped by a signal" in reason and "step" in reason
        finish(streams, expected, RECOVERY_S)
        assert "stopped by a signal, keeps the others waiting" in daemon.log
        assert daemon.pid("rank-1") != stopped
        assert_well(daemon)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_writes_its_stacks(victim: int) -> None:
    fault = {"MOED_FAULT_INJECTION": f"hang:rank={victim}:step=30"}
    with Daemon("--step-timeout", "4", ranks=3, environment=fault) as daemon:
        daemon.wait_ready(120)
        streams = start_all(daemon)
        for stream in streams:
            stream.join(RECOVERY_S)
        assert re.search(rf"rank {victim} \(process \d+\) keeps the others waiting", daemon.log)
        assert "in step 30" in daemon.log
        assert "faults.py" in daemon.log and "on_step" in daemon.log
        assert_same(streams, undisturbed(daemon))
        assert_well(daemon)


@pytest.mark.slow
def test_a_short_pause_costs_only_time() -> None:
    with Daemon("--step-timeout", "6") as daemon:
        daemon.wait_ready()
        expected = undisturbed(daemon)
        streams = start_all(daemon)
        await_growth(streams, 8)
        paused = daemon.pid("rank-0")
        os.kill(paused, signal.SIGSTOP)
        await_status(daemon, "stalled")
        os.kill(paused, signal.SIGCONT)
        await_status(daemon, "ready")
        finish(streams, expected, RECOVERY_S)
        assert daemon.pid("rank-0") == paused
        assert_well(daemon)


@pytest.mark.slow
def test_a_rank_stopped_in_its_sleep_is_found_with_the_next_request() -> None:
    for ranks in (1, 2):
        with Daemon("--step-timeout", "3", ranks=ranks) as daemon:
            daemon.wait_ready()
            expected = undisturbed(daemon)
            daemon.assert_at_rest()
            os.kill(daemon.pid(f"rank-{ranks - 1}"), signal.SIGSTOP)
            streams = start_all(daemon)
            finish(streams, expected, RECOVERY_S)
            assert_well(daemon)


def test_a_killed_front_end_is_replaced() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        expected = Stream(daemon, KINDS["greedy"])
        expected.join()
        url, old = daemon.url, daemon.pid("http")
        ranks = [daemon.pid("rank-0"), daemon.pid("rank-1")]
        orphans = [Stream(daemon, {**LONG, "prompt": PROMPT, "max_tokens": 1900}) for _ in "12"]
        await_growth(orphans, 5)
        kill(daemon, "http")
        killed_at = time.monotonic()
        while not is_ready(url):
            assert time.monotonic() - killed_at < RECOVERY_S
            time.sleep(0.01)
        for orphan in orphans:
            orphan.wait(RECOVERY_S)
            # Cut off, and nothing looks like an end.
            assert isinstance(orphan.error, httpx.HTTPError) and not orphan.is_done
            assert orphan.choices[0].finish_reason is None
        # The ranks have told the new one where they stand: they have given up both.
        daemon.assert_at_rest(2)
        samples = daemon.metrics()
        assert sum(samples["moed:requests_aborted_total", rank] for rank in range(2)) == 2
        stream = Stream(daemon, KINDS["greedy"])
        stream.join()
        assert_same([stream], [expected])
        assert daemon.pid("http") != old
        assert [daemon.pid("rank-0"), daemon.pid("rank-1")] == ranks
        assert daemon.log.count("started rank-") == 2 and "Forming the group anew" not in daemon.log
        assert_well(daemon)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_front_end_is_replaced_while_the_ranks_recover() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        expected = Stream(daemon, KINDS["greedy"])
        expected.join()
        for first, second in (("http", "rank-1"), ("rank-1", "http"), ("http", "http")):
            kill(daemon, first)
            time.sleep(0.5)
            kill(daemon, second)
            time.sleep(0.5)
            daemon.wait_ready()
            stream = Stream(daemon, KINDS["greedy"])
            stream.join()
            assert_same([stream], [expected])
            assert_well(daemon)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_rank_twice_in_a_row_and_while_another_recovers(ranks: int) -> None:
    with Daemon("--max-restarts", "100", ranks=ranks) as daemon:
        daemon.wait_ready(120)
        expected = undisturbed(daemon)
        num_losses = 0
        for victim in range(ranks):
            other = (victim + 1) % ranks
            for again, delay_s in ((victim, 0.0), (other, 0.3), (other, 1.2)):
                streams = start_all(daemon)
                await_growth(streams, 5)
                kill(daemon, f"rank-{victim}")
                await_loss(daemon, num_losses + 1)
                time.sleep(delay_s)
                kill(daemon, f"rank-{again}")
                await_loss(daemon, num_losses + 2)
                num_losses = daemon.log.count("Forming the group anew")
                finish(streams, expected, RECOVERY_S)
                assert_well(daemon)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--all2all-backend", "allgather_reducescatter"),
        ("--all2all-backend", "deepep_low_latency"),
        ("-tp", "2"),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_with_other_backends(arguments: tuple[str, ...]) -> None:
    with Daemon(*arguments) as daemon:
        daemon.wait_ready(120)
        expected = undisturbed(daemon)
        for victim in (1, 0):
            streams = start_all(daemon)
            await_growth(streams, 5)
            kill(daemon, f"rank-{victim}")
            finish(streams, expected, RECOVERY_S)
            assert_well(daemon)


@pytest.mark.slow
def test_a_rank_that_raises_is_started_again() -> None:
    fault = {"MOED_FAULT_INJECTION": "raise:rank=1:step=30"}
    with Daemon(environment=fault) as daemon:
        daemon.wait_ready()
        stream = Stream(daemon, KINDS["greedy"])
        stream.join()
        assert "RuntimeError: injected fault" in daemon.log
        again = Stream(daemon, KINDS["greedy"])
        again.join()
        assert_same([stream], [again])
        assert_well(daemon)


@pytest.mark.slow
def test_an_idle_group_recovers_too() -> None:
    with Daemon() as daemon:
        daemon.wait_ready()
        daemon.assert_at_rest()
        kill(daemon, "rank-0")
        await_loss(daemon, 1)
        assert_well(daemon)


@pytest.mark.slow
def test_too_many_restarts_end_cleanly() -> None:
    with Daemon("--max-restarts", "1") as daemon:
        daemon.wait_ready()
        stream = Stream(daemon, {**LONG, "prompt": PROMPT, "max_tokens": 1900})
        await_growth([stream], 5)
        kill(daemon, "rank-1")
        await_loss(daemon, 1)
        daemon.wait_ready()
        await_growth([stream], 5)
        kill(daemon, "rank-0")
        assert daemon.wait_exit(15) == 70
        assert "rank 0 ended without a word: killed by SIGKILL" in daemon.lines[-1]
        assert any("max_restarts" in line for line in daemon.lines[-5:])
        with pytest.raises(AssertionError, match="rank 0 ended"):
            stream.join(5)


@pytest.mark.slow
def test_a_request_that_ends_the_ranks_costs_no_other_one() -> None:
    """It is not tried for ever, and what streams beside it goes on."""
    fault = {"MOED_FAULT_INJECTION": "kill_with:rank=0:prompt=7;kill_with:rank=1:prompt=7"}
    body = {**LONG, "prompt": PROMPT, "max_tokens": 400}
    with Daemon(environment=fault) as daemon:
        daemon.wait_ready()
        alone = Stream(daemon, body)
        alone.join()
        streams = [Stream(daemon, body) for _ in range(4)]
        await_growth(streams, 5)
        answer = daemon.post("/v1/completions", {"prompt": [5] * 7, "max_tokens": 5})
        assert answer.status_code == 500 and "3 times in a row" in answer.text
        finish(streams, [alone] * len(streams), RECOVERY_S)
        daemon.wait_ready()
        daemon.assert_at_rest()


@pytest.mark.slow
def test_requests_are_held_for_so_long_and_no_longer() -> None:
    with Daemon("--recovery-timeout", "0.3") as daemon:
        daemon.wait_ready()
        stream = Stream(daemon, {**LONG, "prompt": PROMPT, "max_tokens": 1900})
        await_growth([stream], 5)
        kill(daemon, "rank-1")
        with pytest.raises(AssertionError, match="recovery_timeout"):
            stream.join(5)
        refused = daemon.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert_well(daemon)
