"""Long runs: random load with clients that leave, and starts and kills again and again."""

import asyncio
import random
import time

import httpx
import psutil
import pytest

from tests.daemon import Daemon, wait_gone

pytestmark = pytest.mark.slow

SOAK_S = 600
NUM_CLIENTS = 24
ABORT_SHARE = 0.2
MAX_SILENCE_S = 20.0


async def client(daemon_url: str, seed: int, until: float, counts: dict[str, int]) -> None:
    """One client: random prompts and lengths, some cut in the middle, now and then nonsense."""
    generator = random.Random(seed)
    async with httpx.AsyncClient(timeout=MAX_SILENCE_S) as http:
        while time.monotonic() < until:
            prompt = [generator.randrange(20, 400) for _ in range(generator.randrange(1, 400))]
            body = {
                "prompt": prompt,
                "max_tokens": generator.randrange(1, 200),
                "ignore_eos": True,
                "stream": True,
                "temperature": generator.choice((0, 0.8)),
            }
            if generator.random() < 0.05:
                bad = await http.post(f"{daemon_url}/v1/completions", json={**body, "top_p": 7})
                assert bad.status_code == 400
                counts["refused"] += 1
            cut_after = generator.randrange(1, 60) if generator.random() < ABORT_SHARE else None
            await stream(http, daemon_url, body, cut_after, counts)


async def stream(
    http: httpx.AsyncClient,
    daemon_url: str,
    body: dict[str, object],
    cut_after: int | None,
    counts: dict[str, int],
) -> None:
    num_lines = 0
    async with http.stream("POST", f"{daemon_url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            num_lines += 1
            if num_lines == cut_after:
                counts["cut"] += 1
                return
            if line == "data: [DONE]":
                counts["finished"] += 1
                return
    raise AssertionError("a stream ended without [DONE]")


@pytest.mark.timeout(SOAK_S + 300)
def test_soak_ends_with_equal_counters_and_empty_gauges() -> None:
    arguments = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-kv-blocks", "256")
    with Daemon(*arguments) as daemon:
        daemon.wait_ready()
        counts = dict.fromkeys(("finished", "cut", "refused"), 0)

        async def all_clients() -> None:
            until = time.monotonic() + SOAK_S
            await asyncio.gather(
                *(client(daemon.url, seed, until, counts) for seed in range(NUM_CLIENTS))
            )

        ranks = [psutil.Process(daemon.pid(f"rank-{rank}")) for rank in range(2)]
        # Warm first: caches and pools grow once.
        for rank in range(2):
            daemon.tokens([65] * 300, 50, rank)
        before = [rank.memory_info().rss for rank in ranks]
        asyncio.run(all_clients())
        daemon.assert_alive()
        assert min(counts.values()) > 0
        samples = daemon.metrics()
        steps = [samples["moed:engine_steps_total", rank] for rank in range(2)]
        assert steps[0] == steps[1]
        grown = [
            (rank.memory_info().rss - start) / 2**20
            for rank, start in zip(ranks, before, strict=True)
        ]
        print(f"{counts}, steps {steps[0]:.0f}, memory grown by {grown} MiB")
        assert max(grown) < 200


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
