"""The watchdog: who is late, in which step, since when; and that it sleeps when the ranks do."""

import os
import pathlib
import subprocess
import sys

import pytest

from moed.server.heartbeats import NUM_FIELDS, Heartbeat, read_beats
from moed.server.watchdog import (
    Stall,
    Watchdog,
    ask_for_stacks,
    describe,
    is_stopped,
    process_state,
)

NUM_RANKS = 3
TIMEOUT_S = 4.0


class Bench:
    """Ranks that do as the test says, at a time that it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("moed.server.heartbeats.time.monotonic", lambda: self.now)
        shared = [0.0] * (NUM_RANKS * NUM_FIELDS)
        self.pens = [Heartbeat(shared, rank) for rank in range(NUM_RANKS)]
        self.watchdog = Watchdog(lambda: read_beats(shared), TIMEOUT_S, lambda: self.now)

    def look(self) -> Stall | None:
        return self.watchdog.look([], is_formed=True)

    def wake(self, number: int = 1) -> None:
        self.watchdog.on_wake(number)

    def begin(self, step: int = 5, ranks: tuple[int, ...] = (0, 1, 2), wake: int = 1) -> None:
        for rank in ranks:
            self.pens[rank].begin_step(step, wake)
            self.pens[rank].enter()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_one_that_does_not_enter_is_late(bench: Bench) -> None:
    bench.wake()
    bench.begin()
    for pen in bench.pens:
        pen.leave()
    bench.begin(6, (0, 2))
    bench.now += TIMEOUT_S / 2 - 0.1
    assert bench.look() is None
    bench.now += 0.2
    stall = bench.look()
    assert stall is not None and (stall.rank, stall.step_id) == (1, 6)
    assert not bench.watchdog.is_late(stall)
    bench.now += TIMEOUT_S / 2
    stall = bench.look()
    assert stall is not None and bench.watchdog.is_late(stall)


def test_no_rank_is_blamed_when_all_wait_in_the_same_collective(bench: Bench) -> None:
    bench.wake()
    bench.begin()
    bench.now += TIMEOUT_S
    stall = bench.look()
    assert stall is not None and stall.rank is None
    assert "all wait in the same collective" in describe(stall, None)


def test_the_one_inside_an_earlier_collective_is_late(bench: Bench) -> None:
    bench.wake()
    bench.begin()
    for rank in (0, 1):
        bench.pens[rank].leave()
        bench.pens[rank].enter()
    bench.now += TIMEOUT_S
    stall = bench.look()
    assert stall is not None and stall.rank == 2


def test_any_move_begins_the_count_again(bench: Bench) -> None:
    bench.wake()
    bench.begin()
    bench.now += TIMEOUT_S - 0.1
    for pen in bench.pens:
        pen.leave()
    bench.now += TIMEOUT_S / 2 - 0.1
    assert bench.look() is None


def test_it_sleeps_once_all_ranks_do_after_the_last_wake(bench: Bench) -> None:
    bench.wake(1)
    bench.begin(wake=1)
    for pen in bench.pens:
        pen.leave()
        pen.sleep()
    bench.wake(2)
    assert bench.look() is None and bench.watchdog.time_left_s is not None
    bench.begin(wake=2)
    for pen in bench.pens:
        pen.leave()
        pen.sleep()
    bench.now += 3600
    assert bench.look() is None and bench.watchdog.time_left_s is None


def test_one_that_does_not_wake_is_late(bench: Bench) -> None:
    bench.wake(1)
    bench.begin(wake=1)
    for pen in bench.pens:
        pen.leave()
        pen.sleep()
    bench.look()
    bench.now += 3600
    bench.wake(2)
    assert bench.look() is None
    bench.begin(6, (0, 1), wake=2)
    bench.now += TIMEOUT_S
    stall = bench.look()
    assert stall is not None and stall.rank == 2
    assert stall.seconds == TIMEOUT_S


def test_a_group_that_is_being_formed_is_not_late(bench: Bench) -> None:
    bench.watchdog.on_new_group()
    bench.now += 3600
    assert bench.watchdog.look([], is_formed=False) is None
    assert bench.watchdog.time_left_s is not None


def test_a_stopped_process_is_named_also_before_the_group_is_formed() -> None:
    now = 0.0
    beats = read_beats([0.0] * (2 * NUM_FIELDS))
    watchdog = Watchdog(lambda: beats, TIMEOUT_S, lambda: now)
    watchdog.on_new_group()
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert process_state(process.pid) == "T"
            assert is_stopped(process.pid) and not is_stopped(os.getpid())
            assert watchdog.look([1], is_formed=False) is None
            now = TIMEOUT_S
            stall = watchdog.look([1], is_formed=False)
            assert stall is not None and stall.rank == 1 and watchdog.is_late(stall)
            assert "rank 1, stopped by a signal, keeps" in describe(stall, "rank 1")
            # It can say nothing; what is seen from here is its threads.
            assert " T" in ask_for_stacks(process.pid)
        finally:
            process.kill()


def test_a_process_that_is_gone_has_no_state() -> None:
    free = int(pathlib.Path("/proc/sys/kernel/pid_max").read_text())
    assert process_state(free) == ""
