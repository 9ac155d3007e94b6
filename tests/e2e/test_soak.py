"""Long runs: random load with clients that leave or stall, ranks that are killed or stand still,
and starts and kills again and again.
"""

import asyncio
import contextlib
import random
import re
import signal
import time

import httpx
import psutil
import pytest

from tests.daemon import Daemon, wait_gone
from tests.e2e.memory_watch import MemoryWatch
from tests.e2e.random_clients import Accounts, Known, RandomClient
from tests.e2e.stalled import BODY as STALLED
from tests.e2e.stalled import StalledReader, num_paused
from tests.e2e.streams import Stream
from tests.e2e.test_storm import flat, levels

pytestmark = pytest.mark.slow

NUM_CLIENTS = 24
NUM_RANKS = 2
SAMPLE_S = 2.0
KILL_INTERVAL_S = 45.0
# Of the time, from the start: what comes after it shows what ranks take that live for long.
KILL_SHARE = 0.6
PAUSE_INTERVAL_S, MAX_PAUSE_S = 40.0, 3.0
# A client that reads nothing is cut off sooner than it could be in a short run.
STALL_INTERVAL_S, LONGEST_STALL_S, SLOW_READER_TIMEOUT_S = 60.0, 240.0, 15.0
# Of all clients at once, so that the ranks go to sleep and wake.
REST_INTERVAL_S, REST_S = 30.0, 3.0
# By the slope over the second half of what is known of a process that still runs.
MAX_GROWN_MIB = 48.0
# Descriptors, and threads: far less than one for each fault, not to speak of each request.
MAX_MORE = 8
# Prompts around the sizes of blocks and of the budget.
KNOWN_LENGTHS = (1, 3, 16, 17, 63, 64, 65, 150, 300)
# A KV cache that overflows, and a budget that prompts overflow: preemption and pieces all the time.
ARGUMENTS = (
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-kv-blocks", "256"),
    *("--no-access-log", "--slow-reader-timeout", str(SLOW_READER_TIMEOUT_S)),
    *("--max-restarts", "1000"),
)


def known_answers(daemon: Daemon) -> list[Known]:
    """What greedy requests give alone; long and short prompts."""
    generator, known = random.Random(7), []
    for length in KNOWN_LENGTHS:
        prompt = [generator.randrange(20, 400) for _ in range(length)]
        known.append(Known(prompt, daemon.tokens(prompt, 150)))
    return known


class Soak:
    """One daemon under random load for a while."""

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        self._daemon = daemon
        self._until = time.monotonic() + seconds
        self._kill_until = time.monotonic() + KILL_SHARE * seconds
        self._may_go_on = asyncio.Event()
        self._solo: list[int] = []
        self.accounts = Accounts()
        self.memory = MemoryWatch()
        self.num_kills = self.num_pauses = self.num_stalls = 0

    @property
    def pids(self) -> dict[str, int]:
        """Of what runs now."""
        names = ("http", *(f"rank-{rank}" for rank in range(NUM_RANKS)))
        return {name: self._daemon.pid(name) for name in names}

    async def run(self) -> None:
        known = await asyncio.to_thread(known_answers, self._daemon)
        alone = Stream(self._daemon, {**STALLED, "n": 1, "logprobs": None})
        await asyncio.to_thread(alone.join, LONGEST_STALL_S)
        self._solo = alone.choices[0].token_ids
        self._may_go_on.set()
        clients = [
            RandomClient(self._daemon.url, seed, known, self.accounts).run(
                self._until, self._may_go_on
            )
            for seed in range(NUM_CLIENTS)
        ]
        works = (self._watch(), self._rest(), self._kill(), self._pause())
        async with asyncio.TaskGroup() as tasks:
            disturbers = [tasks.create_task(work) for work in works]
            await asyncio.gather(*clients, self._stall())
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
        while time.monotonic() + KILL_INTERVAL_S < self._kill_until:
            await asyncio.sleep(KILL_INTERVAL_S)
            victim = self.pids[f"rank-{generator.randrange(NUM_RANKS)}"]
            psutil.Process(victim).kill()
            self.num_kills += 1

    async def _pause(self) -> None:
        """A rank stands still for a moment, and goes on."""
        generator = random.Random(12)
        while True:
            await asyncio.sleep(PAUSE_INTERVAL_S)
            paused = psutil.Process(self.pids[f"rank-{generator.randrange(NUM_RANKS)}"])
            # It may be killed meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                paused.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(generator.uniform(0.2, MAX_PAUSE_S))
                finally:
                    paused.send_signal(signal.SIGCONT)
            self.num_pauses += 1

    async def _stall(self) -> None:
        """One client after another that reads nothing: some read on later, others are cut off."""
        while time.monotonic() + LONGEST_STALL_S < self._until:
            self.accounts.num_sent += 1
            outcome = await asyncio.to_thread(self._one_stall, self.num_stalls % 2 == 0)
            self.accounts.outcomes[outcome] += 1
            self.accounts.choices[outcome] += STALLED["n"]
            self.num_stalls += 1
            await asyncio.sleep(STALL_INTERVAL_S)

    def _one_stall(self, reads_on: bool) -> str:
        with StalledReader(self._daemon) as reader:
            if not reads_on:
                reader.wait_cut_off(LONGEST_STALL_S)
                return "cut"
            deadline = time.monotonic() + SLOW_READER_TIMEOUT_S / 2
            while time.monotonic() < deadline and not num_paused(self._daemon):
                time.sleep(0.5)
            assert reader.read_on() == dict.fromkeys(range(STALLED["n"]), self._solo)
            return "finished"


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
    with Daemon(*ARGUMENTS, ranks=NUM_RANKS) as daemon:
        daemon.wait_ready()
        daemon.assert_alive()
        before = levels(daemon)
        soak = Soak(daemon, seconds)
        asyncio.run(asyncio.wait_for(soak.run(), seconds + 180))
        daemon.assert_alive()
        accounts, memory = soak.accounts, soak.memory
        report = {
            "seconds": seconds,
            "kills": soak.num_kills,
            "pauses": soak.num_pauses,
            "stalled readers": soak.num_stalls,
            "sent": accounts.num_sent,
            **accounts.outcomes,
            "compared": accounts.num_compared,
            "longest silence s": round(accounts.longest_silence_s, 2),
            "MiB an hour": {name: round(memory.slope(pid), 1) for name, pid in soak.pids.items()},
            "MiB grown": {name: round(memory.grown(pid), 1) for name, pid in soak.pids.items()},
            "descriptors and threads": {"before": before, "after": levels(daemon)},
        }
        print(report)
        assert accounts.num_sent == sum(accounts.outcomes.values()), report
        assert min(accounts.outcomes[kind] for kind in ("finished", "cut", "refused")) > 0
        assert accounts.num_compared > 0
        assert_all_are_accounted_for(accounts, ended_by_reason(daemon))
        assert_steps_are_equal(daemon)
        assert num_paused(daemon) == 0
        assert max(memory.grown(pid) for pid in soak.pids.values()) < MAX_GROWN_MIB, report
        assert_levels_have_returned(daemon, before)


def assert_levels_have_returned(daemon: Daemon, before: dict[str, tuple[int, int]]) -> None:
    """Of processes that may have been replaced meanwhile."""
    deadline = time.monotonic() + 10
    while any(
        now > then + MAX_MORE for now, then in zip(flat(levels(daemon)), flat(before), strict=True)
    ):
        assert time.monotonic() < deadline, (before, levels(daemon))
        time.sleep(0.1)


def assert_all_are_accounted_for(accounts: Accounts, ended: dict[str, float]) -> None:
    """The clients' book against the daemon's. What was cut had begun, had just ended, or had never
    been taken in.
    """
    whole, cut = accounts.choices["finished"], accounts.choices["cut"]
    # Asked here, beside the clients: twice on each rank, and once what a stalled one should get.
    own = len(KNOWN_LENGTHS) + 2 * NUM_RANKS + 1
    assert ended["error"] == 0, ended
    assert whole + own <= ended["length"] + ended["stop"] <= whole + own + cut, (ended, accounts)
    assert 0 < ended["abort"] <= cut, (ended, accounts)


def assert_steps_are_equal(daemon: Daemon) -> None:
    """Of all ranks since the start, and they still make the same."""

    def steps() -> list[float]:
        daemon.assert_at_rest()
        samples = daemon.metrics()
        return [samples["moed:engine_steps_total", rank] for rank in range(NUM_RANKS)]

    before = steps()
    for rank in range(NUM_RANKS):
        daemon.tokens([65] * 70, 20, rank)
    deadline = time.monotonic() + 5
    # A rank without requests tells its counters when the group goes to sleep.
    while len(set(now := steps())) > 1 or min(now) <= max(before):
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
        with Daemon("--on-rank-failure", "exit") as daemon:
            daemon.wait_ready(90)
            pids = [daemon.pid(name) for name in ("http", "rank-0", "rank-1")]
            time.sleep(0.2 * repeat)
            psutil.Process(daemon.pid(f"rank-{victim}")).kill()
            assert daemon.wait_exit(15) == 70
            assert f"rank {victim}" in daemon.lines[-1]
            wait_gone(pids, 5)
