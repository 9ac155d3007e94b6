"""The daemon with its work split in every way: the same answers, and the same manners."""

import concurrent.futures
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from moed.dist.registry import capabilities
from tests.daemon import Daemon, events
from tests.e2e.test_disconnect import LONG, raw_request

PROMPTS = [
    [(11 * position + 7 * index) % 400 + 20 for position in range(3 + 17 * index)]
    for index in range(6)
]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one process alone answers."""
    with Daemon(ranks=1) as daemon:
        daemon.wait_ready()
        return [daemon.tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]


def answers_under_load(daemon: Daemon) -> list[list[int]]:
    """All prompts at once, while other requests come and are given up."""

    def disturb() -> None:
        for index in range(6):
            with raw_request(daemon, {**LONG, "stream": bool(index % 2)}, index % daemon.ranks):
                time.sleep(0.05)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: daemon.tokens(prompt, NUM_TOKENS), PROMPTS))
    disturber.join(30)
    return found


BACKENDS = [name for name, entry in capabilities().items() if entry.requires_expert_parallel]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        *((2, ("--all2all-backend", name)) for name in BACKENDS),
        (1, ("-tp", "2")),
        (2, ("-tp", "2", "--all2all-backend", "deepep_low_latency")),
        (2, ("--no-enable-expert-parallel",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_answers_are_those_of_one_process(
    expected: list[list[int]], ranks: int, arguments: tuple[str, ...]
) -> None:
    with Daemon(*arguments, "--max-num-batched-tokens", "32", ranks=ranks) as daemon:
        daemon.wait_ready()
        assert answers_under_load(daemon) == expected
        daemon.assert_alive()
        assert [value for _, value in daemon.series("moed:dropped_tokens_total")] == [0]
        daemon.process.terminate()
        assert daemon.wait_exit(20) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_member_ends_everything_where_that_is_asked_for(victim: int) -> None:
    """Process 1 schedules nothing and sends no tokens; it is missed all the same."""
    with Daemon("-tp", "2", "--on-rank-failure", "exit", ranks=1) as daemon:
        daemon.wait_ready()
        pids = [daemon.pid("rank-0"), daemon.pid("rank-1")]
        body = {**LONG, "max_tokens": 1900, "stream": True, "temperature": 0}
        seen: list[Any] = []
        with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=30) as answer:
            for event in events(answer):
                seen.append(event)
                if len(seen) == 5:
                    psutil.Process(pids[victim]).kill()
        assert seen[-1]["error"]["type"] == "server_error", seen[-1]
        assert daemon.wait_exit(10) == 70
        assert f"rank {victim} ended without a word: killed by SIGKILL" in daemon.lines[-1]


def test_members_sleep_and_wake() -> None:
    with Daemon("-tp", "2", ranks=1) as daemon:
        daemon.wait_ready()
        first = daemon.tokens(PROMPTS[1], NUM_TOKENS)
        member = psutil.Process(daemon.pid("rank-1"))
        time.sleep(1.0)
        before, started = member.cpu_times(), time.monotonic()
        time.sleep(3.0)
        after, span_s = member.cpu_times(), time.monotonic() - started
        used_s = after.user + after.system - before.user - before.system
        assert used_s / span_s < 0.05
        assert daemon.tokens(PROMPTS[1], NUM_TOKENS) == first
