"""No step ever runs more than B tokens, and B holds all the way to the MoE layers."""

import concurrent.futures
import time

import pytest

from tests.daemon import Daemon
from tests.e2e.conftest import MAX_NUM_BATCHED_TOKENS as B


@pytest.mark.parametrize("num_tokens", [B - 1, B, B + 1, 200])
def test_prompts_around_the_budget(daemon: Daemon, num_tokens: int) -> None:
    answer = daemon.complete([65] * num_tokens, 2)
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["usage"]["completion_tokens"] == 2


def test_no_step_exceeds_the_budget_under_load(daemon: Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor(41) as pool:
        decodes = [pool.submit(daemon.tokens, [70 + n], 30) for n in range(40)]
        long = pool.submit(daemon.tokens, [66] * 200, 5)
        assert all(len(decode.result(60)) == 30 for decode in decodes)
        assert len(long.result(60)) == 5
    samples = daemon.metrics()
    for rank in range(2):
        assert 0 < samples["moed:max_step_tokens", rank] <= B


def test_both_ranks_compute_expert_rows(daemon: Daemon) -> None:
    before, rows_before = daemon.metrics(), [daemon.rank_tokens(rank) for rank in (0, 1)]
    daemon.complete([65] * 50, 4, rank=0)
    # The rank without the request reports its counters when the group goes to sleep.
    name = "moed:engine_steps_total"
    deadline = time.monotonic() + 5
    while True:
        after = daemon.metrics()
        if after[name, 0] == after[name, 1] > before[name, 0]:
            break
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.05)
    # Rank 1 has no request, but some of the experts that rank 0's tokens chose.
    assert all(daemon.rank_tokens(rank) > rows_before[rank] for rank in (0, 1))
    assert after[name, 0] - before[name, 0] == after[name, 1] - before[name, 1] >= 4


def test_max_num_seqs_above_the_budget_is_refused_with_both_numbers() -> None:
    with Daemon("--max-num-batched-tokens", "8", "--max-num-seqs", "16") as daemon:
        assert daemon.wait_exit(30) == 78
        assert "8" in daemon.log and "16" in daemon.log and "Traceback" not in daemon.log


def test_prompts_beyond_the_budget_without_chunked_prefill_are_refused_at_start() -> None:
    arguments = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "64")
    with Daemon(*arguments, "--max-num-seqs", "8", "--max-model-len", "256") as daemon:
        assert daemon.wait_exit(30) == 78
        assert "64" in daemon.log and "256" in daemon.log and "Traceback" not in daemon.log
