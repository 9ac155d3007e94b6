"""Priorities: who is served first, and that nobody is thrown out and let in for ever."""

import random

from tests.server.engine.fakes import VOCAB_SIZE, Harness, expected_output


def ends(harness: Harness) -> list[str]:
    """Run to the end; ids in the order in which they ended."""
    ended = []
    for _ in range(5000):
        if not harness.scheduler.has_requests:
            break
        ended += [output.request_id for output in harness.step() if output.finish_reason]
    return ended


def test_any_priorities_in_a_small_cache_end_and_equal_solo() -> None:
    for seed in range(20):
        generator = random.Random(seed)
        harness = Harness(budget=16, num_blocks=10, block_size=4, max_num_seqs=6, max_model_len=40)
        prompts = {}
        for number in range(30):
            prompt = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, 10))]
            prompts[str(number)] = prompt
            harness.add(str(number), prompt, 30, priority=generator.randrange(-3, 4))
            for _ in range(generator.randrange(3)):
                harness.step()
        harness.run()
        assert {harness.finish_reason(name) for name in prompts} == {"length"}
        assert harness.scheduler.counters.num_preemptions > 0
        for name, prompt in prompts.items():
            assert harness.tokens(name) == expected_output(prompt, 30, [])
        assert harness.blocks.num_used_blocks == 0


def test_nobody_is_let_in_and_thrown_out_in_one_step() -> None:
    harness = Harness(budget=16, num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=24)
    for number in range(12):
        prompt = [number % VOCAB_SIZE] * 3
        harness.add(str(number), prompt, 20, priority=-number)
    while harness.scheduler.has_requests:
        harness.step()
        scheduled = {s.request.request_id for s in harness.steps[-1].requests}
        served = {r.request_id for r in harness.scheduler._running}
        ended = {name for name in scheduled if harness.finish_reason(name)}
        assert scheduled <= served | ended
    assert harness.scheduler.counters.num_preemptions > 0


def test_an_urgent_request_takes_the_next_seat_and_no_one_s_place() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=64)
    harness.add("low-1", [1], 20, priority=5)
    harness.add("low-2", [2], 40, priority=5)
    harness.step()
    harness.add("low-3", [3], 5, priority=5)
    harness.add("high", [4], 5, priority=0)
    assert ends(harness) == ["low-1", "high", "low-3", "low-2"]
    assert harness.scheduler.counters.num_preemptions == 0


def test_a_flood_of_urgent_requests_ends_and_then_the_other_is_served() -> None:
    harness = Harness(budget=16, max_num_seqs=2, num_blocks=8, block_size=4, max_model_len=32)
    harness.add("low", [7], 25, priority=5)
    harness.step()
    for number in range(30):
        harness.add(str(number), [number % VOCAB_SIZE] * 4, 20, priority=0)
    assert ends(harness)[-1] == "low"
    assert harness.tokens("low") == expected_output([7], 25, [])
