"""Long runs: random load with clients that leave, and starts and kills again and again."""

import asyncio
import random
import re
import subprocess
import sys
import time
from functools import cache

import httpx
import psutil
import pytest

from tests.daemon import Daemon, wait_gone
from tests.e2e.memory_watch import MemoryWatch
from tests.e2e.random_clients import Accounts, Known, RandomClient

pytestmark = pytest.mark.slow

NUM_CLIENTS = 24
NUM_RANKS = 2
SAMPLE_S = 2.0
KILL_INTERVAL_S = 45.0
# Of all clients at once, so that the ranks go to sleep and wake.
REST_INTERVAL_S, REST_S = 30.0, 3.0
MAX_GROWN_MIB = 48.0
# Prompts around the sizes of blocks and of the budget.
KNOWN_LENGTHS = (1, 3, 16, 17, 63, 64, 65, 150, 300)
RECOVER = "--on-rank-failure"
# A KV cache that overflows, and a budget that prompts overflow: preemption and pieces all the time.
ARGUMENTS = (
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-kv-blocks", "256"),
    "--no-access-log",
)


@cache
def can_recover() -> bool:
    """Whether a killed rank is replaced."""
    shown = subprocess.run(
        [sys.executable, "-m", "moed.server", "serve", "--help=all"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return RECOVER in shown.stdout


def known_answers(daemon: Daemon) -> list[Known]:
    """What greedy requests give alone; long and short prompts."""
    generator, known = random.Random(7), []
    for length in KNOWN_LENGTHS:
        prompt = [generator.randrange(20, 400) for _ in range(length)]
        known.append(Known(prompt, daemon.tokens(prompt, 150)))
    return known


class Soak:
    """One daemon under random load for a while."""

    def __init__(self, daemon: Daemon, seconds: float, max_kills: int) -> None:
        self._daemon = daemon
        self._until = time.monotonic() + seconds
        self._max_kills = max_kills
        self._may_go_on = asyncio.Event()
        self.accounts = Accounts()
        self.memory = MemoryWatch()
        self.num_kills = 0

    @property
    def pids(self) -> dict[str, int]:
        """Of what runs now."""
        names = ("http", *(f"rank-{rank}" for rank in range(NUM_RANKS)))
        return {name: self._daemon.pid(name) for name in names}

    async def run(self) -> None:
        known = await asyncio.to_thread(known_answers, self._daemon)
        self._may_go_on.set()
        clients = [
            RandomClient(self._daemon.url, seed, known, self.accounts).run(
                self._until, self._may_go_on
            )
            for seed in range(NUM_CLIENTS)
        ]
        async with asyncio.TaskGroup() as tasks:
            disturbers = [
                tasks.create_task(work) for work in (self._watch(), self._rest(), self._kill())
            ]
            await asyncio.gather(*clients)
            for task in disturbers:
                task.cancel()

    async def _watch(self) -> None:
        while True:
            self.memory.sample(list(self.pids.values()))
            await asyncio.sleep(SAMPLE_S)

    async def _rest(self) -> None:
        while True:
            await asyncio.sleep(REST_INTERVAL_S)
            self._may_go_on.clear()
            await asyncio.sleep(REST_S)
            self._may_go_on.set()

    async def _kill(self) -> None:
        generator = random.Random(11)
        while self.num_kills < self._max_kills:
            await asyncio.sleep(KILL_INTERVAL_S)
            victim = self.pids[f"rank-{generator.randrange(NUM_RANKS)}"]
            psutil.Process(victim).kill()
            self.num_kills += 1


def ended_by_reason(daemon: Daemon) -> dict[str, float]:
    """Choices that the daemon has counted, all ranks together."""
    text = httpx.get(f"{daemon.url}/metrics", timeout=10).text
    found: dict[str, float] = {}
    for reason, value in re.findall(
        r'^moed:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)$', text, re.M
    ):
        found[reason] = found.get(reason, 0.0) + float(value)
    return found


@pytest.mark.timeout(0)
def test_soak_ends_with_equal_counters_and_empty_gauges(pytestconfig: pytest.Config) -> None:
    seconds = float(pytestconfig.getoption("--soak-seconds"))
    max_kills = int(seconds / KILL_INTERVAL_S) if can_recover() else 0
    recovery = (RECOVER, "recover", "--max-restarts", str(max_kills + 1)) if max_kills else ()
    with Daemon(*ARGUMENTS, *recovery, ranks=NUM_RANKS) as daemon:
        daemon.wait_ready()
        soak = Soak(daemon, seconds, max_kills)
        asyncio.run(asyncio.wait_for(soak.run(), seconds + 180))
        daemon.assert_alive()
        accounts, memory = soak.accounts, soak.memory
        report = {
            "seconds": seconds,
            "kills": soak.num_kills,
            "sent": accounts.num_sent,
            **accounts.outcomes,
            "compared": accounts.num_compared,
            "longest silence s": round(accounts.longest_silence_s, 2),
            "MiB an hour": {name: round(memory.slope(pid), 1) for name, pid in soak.pids.items()},
        }
        print(report)
        assert accounts.num_sent == sum(accounts.outcomes.values()), report
        assert min(accounts.outcomes[kind] for kind in ("finished", "cut", "refused")) > 0
        assert accounts.num_compared > 0
        assert_all_are_accounted_for(accounts, ended_by_reason(daemon))
        assert_steps_are_equal(daemon, is_undisturbed=soak.num_kills == 0)
        assert max(memory.grown(pid) for pid in soak.pids.values()) < MAX_GROWN_MIB, report


def assert_all_are_accounted_for(accounts: Accounts, ended: dict[str, float]) -> None:
    """The clients' book against the daemon's. What was cut had begun, had just ended, or had never
    been taken in.
    """
    whole, cut = accounts.choices["finished"], accounts.choices["cut"]
    # Asked here, beside the clients.
    own = len(KNOWN_LENGTHS) + NUM_RANKS
    assert ended["error"] == 0, ended
    assert whole + own <= ended["length"] + ended["stop"] <= whole + own + cut, (ended, accounts)
    assert 0 < ended["abort"] <= cut, (ended, accounts)


def assert_steps_are_equal(daemon: Daemon, is_undisturbed: bool) -> None:
    """Of all ranks since the start; where some were started later, from now on."""

    def steps() -> list[float]:
        daemon.assert_at_rest()
        samples = daemon.metrics()
        return [samples["moed:engine_steps_total", rank] for rank in range(NUM_RANKS)]

    before = steps()
    for rank in range(NUM_RANKS):
        daemon.tokens([65] * 70, 20, rank)
    deadline = time.monotonic() + 5
    while True:
        # A rank without requests tells its counters when the group goes to sleep.
        now = steps()
        made = {after - start for after, start in zip(now, before, strict=True)}
        if len(made) == 1 and min(made) > 0 and not (is_undisturbed and len(set(now)) > 1):
            return
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.1)


def test_daemons_started_together_five_times() -> None:
    for _ in range(5):
        with Daemon() as one, Daemon() as two:
            for daemon in (one, two):
                daemon.wait_ready(90)
                daemon.assert_alive()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_again_and_again(victim: int) -> None:
    for repeat in range(5):
        with Daemon() as daemon:
            daemon.wait_ready(90)
            pids = [daemon.pid(name) for name in ("http", "rank-0", "rank-1")]
            time.sleep(0.2 * repeat)
            psutil.Process(daemon.pid(f"rank-{victim}")).kill()
            assert daemon.wait_exit(15) == 70
            assert f"rank {victim}" in daemon.lines[-1]
            wait_gone(pids, 5)
