"""Ranks with unequal work stay in step, and nobody's work changes another's result."""

import concurrent.futures
import itertools
import random
import threading
import time
from collections.abc import Sequence

import httpx
import pytest

from tests.daemon import Daemon, events
from tests.e2e.conftest import MAX_NUM_BATCHED_TOKENS as B

PROMPT = list(range(40, 63))


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(20, 400) for _ in range(num_tokens)]


def at_once(daemon: Daemon, work: Sequence[tuple[list[int], int, int | None]]) -> list[list[int]]:
    """Send (prompt, max_tokens, rank) all at once; the token ids of each, in order."""
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda item: daemon.tokens(*item), work))


def test_one_busy_rank_and_one_idle_rank(daemon: Daemon) -> None:
    answers = [daemon.tokens(PROMPT, 64, rank) for rank in itertools.islice(_alternate(), 20)]
    assert all(answer == answers[0] and len(answer) == 64 for answer in answers)


def _alternate() -> "itertools.cycle[int]":
    return itertools.cycle((0, 1))


def test_work_after_the_group_slept(daemon: Daemon) -> None:
    first = daemon.tokens(PROMPT, 8, 0)
    for pause_s, rank in ((0.2, 1), (1.0, 0), (2.0, 1)):
        time.sleep(pause_s)
        assert daemon.tokens(PROMPT, 8, rank) == first


def test_one_rank_drains_before_the_other(daemon: Daemon) -> None:
    short, long = at_once(daemon, [(PROMPT, 4, 0), (PROMPT, 200, 1)])
    assert (len(short), len(long)) == (4, 200)
    lengths = list(range(1, 65))
    answers = at_once(daemon, [(PROMPT, length, None) for length in lengths])
    assert [len(answer) for answer in answers] == lengths
    assert all(answer == answers[-1][: len(answer)] for answer in answers)


@pytest.mark.parametrize("num_tokens", [1, B, B + 1])
def test_prompt_at_the_edges_of_the_budget(daemon: Daemon, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    assert daemon.tokens(prompt, 4, 0) == daemon.tokens(prompt, 4, 1)


@pytest.mark.parametrize("long_rank", [0, 1])
def test_ragged_loads_equal_solo(daemon: Daemon, long_rank: int) -> None:
    long, short = prompt_of(5 * B + 3, seed=1), prompt_of(3, seed=2)
    solo = [daemon.tokens(long, 6, long_rank), daemon.tokens(short, 40, 1 - long_rank)]
    assert at_once(daemon, [(long, 6, long_rank), (short, 40, 1 - long_rank)]) == solo


def test_counts_of_b_one_and_none_mixed(daemon: Daemon) -> None:
    prompts = [prompt_of(count, seed=count) for count in (B, 1, 3 * B, 2, B - 1, B + 1)]
    solo = [daemon.tokens(prompt, 5) for prompt in prompts]
    for order in range(4):
        work = [(prompt, 5, (index + order) % 2) for index, prompt in enumerate(prompts)]
        assert at_once(daemon, work) == solo


def test_two_prompts_side_by_side_equal_solo_every_time(daemon: Daemon) -> None:
    seven, many = prompt_of(7, seed=7), prompt_of(23, seed=23)
    solo = [daemon.tokens(seven, 16, 0), daemon.tokens(many, 16, 1)]
    for repeat in range(50):
        ranks = (0, 1) if repeat % 2 == 0 else (1, 0)
        assert at_once(daemon, [(seven, 16, ranks[0]), (many, 16, ranks[1])]) == solo


def test_both_ranks_prefill_the_whole_budget_in_one_step(daemon: Daemon) -> None:
    prompts = [prompt_of(B, seed=100 + index) for index in range(16)]
    solo = [daemon.tokens(prompt, 2) for prompt in prompts]
    assert at_once(daemon, [(p, 2, i % 2) for i, p in enumerate(prompts)]) == solo


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_long_prefills_beside_short_decodes_never_stall(daemon: Daemon, seconds: float) -> None:
    """Rank 0 prefills while rank 1 decodes, swapping; no gap between tokens of 2 s."""
    stop = threading.Event()
    errors: list[str] = []

    def prefill() -> None:
        for count in itertools.count():
            if stop.is_set():
                return
            if len(daemon.tokens(prompt_of(6 * B, seed=count), 1, (count // 4) % 2)) != 1:
                errors.append("a prefill gave no token")

    worker = threading.Thread(target=prefill)
    worker.start()
    longest_gap_s, started = 0.0, time.monotonic()
    try:
        for rank in itertools.cycle((1, 0)):
            if time.monotonic() - started > seconds:
                break
            stamps = [time.monotonic()]
            body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
            with httpx.stream(
                "POST",
                f"{daemon.url}/v1/completions",
                json=body,
                headers={"X-data-parallel-rank": str(rank)},
                timeout=60,
            ) as response:
                for _ in events(response):
                    stamps.append(time.monotonic())
            gaps = [after - before for before, after in itertools.pairwise(stamps)]
            longest_gap_s = max(longest_gap_s, *gaps)
    finally:
        stop.set()
        worker.join(30)
    assert not errors
    assert longest_gap_s < 2.0
