"""Requests whose clients do not read hold nothing, delay nobody, and go on as if undisturbed."""

import random

import pytest

from tests.server.engine.fakes import VOCAB_SIZE, Harness, expected_output

pytestmark = pytest.mark.usefixtures("any_order")


def gauges(harness: Harness) -> tuple[int, int, int]:
    scheduler = harness.scheduler
    return scheduler.num_running, scheduler.num_waiting, scheduler.num_paused


def test_a_paused_request_gives_up_its_place_and_its_blocks() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("slow", [1, 2, 3], 20)
    harness.add("next", [4, 5], 3)
    harness.step()
    harness.step()
    assert gauges(harness) == (1, 1, 0)
    harness.scheduler.pause(["slow", "unknown"])
    harness.scheduler.pause(["slow"])
    assert gauges(harness) == (0, 1, 1) and harness.blocks.num_used_blocks == 0
    harness.run()
    assert harness.finish_reason("next") == "length" and harness.finish_reason("slow") is None
    # All that is left is paused: nothing to compute, so the rank may sleep.
    assert not harness.scheduler.has_requests and gauges(harness) == (0, 0, 1)
    harness.scheduler.resume(["slow", "next", "unknown"])
    harness.run()
    assert harness.tokens("slow") == expected_output([1, 2, 3], 20, [])
    assert gauges(harness) == (0, 0, 0) and harness.blocks.num_used_blocks == 0
    assert harness.scheduler.counters.num_preemptions == 0


def test_a_paused_request_can_be_aborted() -> None:
    harness = Harness()
    harness.add("slow", [1, 2, 3], 20)
    harness.step()
    harness.scheduler.pause(["slow"])
    harness.scheduler.abort(["slow"])
    harness.scheduler.resume(["slow"])
    assert gauges(harness) == (0, 0, 0) and not harness.scheduler.has_requests
    assert harness.scheduler.num_queued_tokens == 0


def test_a_resumed_request_waits_in_its_old_place() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("a", "b", "c"):
        harness.add(name, [ord(name) % VOCAB_SIZE], 2)
    harness.scheduler.pause(["a", "b"])
    harness.scheduler.resume(["b"])
    harness.scheduler.resume(["a"])
    ends = []
    while harness.scheduler.has_requests:
        ends += [output.request_id for output in harness.step() if output.finish_reason]
    assert ends == ["a", "b", "c"]


def test_any_pauses_change_no_output() -> None:
    for seed in range(40):
        generator = random.Random(seed)
        harness = Harness(budget=8, num_blocks=10, block_size=4, max_num_seqs=3, max_model_len=32)
        names = [str(number) for number in range(6)]
        for number, name in enumerate(names):
            prompt = [number * 5 % VOCAB_SIZE + 1] * generator.randrange(1, 12)
            harness.add(name, prompt, 15, priority=generator.randrange(2))
        prompts = {name: r.token_ids[:] for name, r in harness.scheduler._requests.items()}
        for _ in range(60):
            if harness.scheduler.has_requests:
                harness.step()
            harness.scheduler.pause(generator.sample(names, 2))
            harness.scheduler.resume(generator.sample(names, 2))
        harness.scheduler.resume(names)
        harness.run()
        for name, prompt in prompts.items():
            assert harness.tokens(name) == expected_output(prompt, 15, [])
        assert gauges(harness) == (0, 0, 0) and harness.blocks.num_used_blocks == 0
        assert harness.scheduler.num_queued_tokens == 0
