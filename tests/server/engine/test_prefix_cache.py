"""Prefixes are computed once, shared by full blocks, and never between what differs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moed.config.windows import Window
from moed.server.block_pool import BlockPool
from moed.server.prefix import PrefixMemory, extend_keys
from moed.server.scheduler import Sampled
from tests.server.engine.fakes import Harness, expected_output

pytestmark = pytest.mark.usefixtures("any_order")

PROMPT = list(range(20, 40))


def num_cached(harness: Harness, name: str) -> int:
    return harness.outputs[name][0].num_cached_tokens


def run_after_another(prompt: list[int], **more: Any) -> Harness:
    """`second` runs when `first`, whose prompt is `PROMPT`, has ended. Blocks of 4 tokens."""
    harness = Harness(budget=64)
    harness.add("first", PROMPT, 6)
    harness.run()
    harness.add("second", prompt, 5, **more)
    harness.run()
    assert harness.tokens("second") == expected_output(prompt, 5, [])
    return harness


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, 16),  # five full blocks, but the last token is computed again
        ([*PROMPT, 1], 20),
        (PROMPT[:19], 16),
        (PROMPT[:4], 0),
        ([*PROMPT[:10], 0, *PROMPT[11:]], 8),
        ([0, *PROMPT[1:]], 0),
        # Of the output, the last token has never been an input.
        ([*PROMPT, *expected_output(PROMPT, 6, [])], 24),
    ],
)
def test_full_blocks_of_the_common_beginning_are_shared(prompt: list[int], expected: int) -> None:
    harness = run_after_another(prompt)
    assert num_cached(harness, "first") == 0 and num_cached(harness, "second") == expected
    assert harness.steps[-5].num_tokens == len(prompt) - expected
    counters = harness.scheduler.counters
    assert counters.num_prefix_queries == len(PROMPT) + len(prompt)
    assert counters.num_prefix_hits == expected
    assert counters.num_prompt_tokens == len(PROMPT) + len(prompt) - expected
    assert harness.blocks.num_used_blocks == 0


def test_only_equal_salts_share() -> None:
    harness = Harness(budget=64)
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x"), ("e", None)):
        harness.add(name, PROMPT, 2, cache_salt=salt)
        harness.run()
    assert [num_cached(harness, name) for name in "abcde"] == [0, 0, 0, 16, 16]


@pytest.mark.parametrize("budget", [64, 7])
def test_requests_of_one_step_share_what_its_first_one_computes(budget: int) -> None:
    harness = Harness(budget=budget)
    for name in "abcd":
        harness.add(name, PROMPT, 4)
    harness.run()
    assert [num_cached(harness, name) for name in "abcd"] == [0, 16, 16, 16]
    assert harness.scheduler.counters.num_prompt_tokens == 20 + 3 * 4
    for name in "abcd":
        assert harness.tokens(name) == expected_output(PROMPT, 4, [])


def test_what_scores_every_prompt_token_computes_every_one() -> None:
    harness = run_after_another(PROMPT, prompt_logprobs=0)
    (first, *_) = harness.outputs["second"]
    assert first.num_cached_tokens == 0
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 20
    harness.add("third", PROMPT, 3, return_routed_experts=True)
    harness.run()
    assert num_cached(harness, "third") == 0


def test_switched_off_nothing_is_shared() -> None:
    harness = Harness(budget=64, shares_prefixes=False)
    harness.add("a", PROMPT, 4)
    harness.add("b", PROMPT, 4)
    harness.run()
    assert num_cached(harness, "b") == 0
    assert harness.scheduler.counters.num_prompt_tokens == 40


def test_forgotten_prefixes_are_computed_again_and_running_requests_keep_theirs() -> None:
    harness = Harness(budget=64, num_blocks=32)
    harness.add("a", PROMPT, 12)
    harness.step()
    harness.blocks.forget_prefixes()
    harness.add("b", PROMPT, 12)
    harness.run()
    assert num_cached(harness, "b") == 0
    for name in "ab":
        assert harness.tokens(name) == expected_output(PROMPT, 12, [])
    assert harness.blocks.num_free_blocks == 32


def test_blocks_of_a_request_that_went_wrong_are_not_shared() -> None:
    harness = Harness(budget=64)
    harness.add("a", PROMPT, 4)
    schedule = harness.scheduler.schedule()
    harness.scheduler.advance(schedule)
    harness.scheduler.update(schedule, [Sampled(None, None, (), "not a number")])
    harness.add("b", PROMPT, 4)
    harness.run()
    assert num_cached(harness, "b") == 0


def test_aborted_request_leaves_what_it_computed() -> None:
    harness = Harness(budget=8)
    harness.add("a", PROMPT, 4)
    harness.step()
    harness.scheduler.abort(["a"])
    harness.add("b", PROMPT, 4)
    harness.run()
    assert num_cached(harness, "b") == 8


def test_kept_blocks_make_room_from_the_end_of_the_oldest() -> None:
    harness = Harness(budget=64, num_blocks=8, block_size=4, max_model_len=32)
    harness.add("old", PROMPT[:16], 1)
    harness.run()
    harness.add("other", [1] * 21, 1)  # takes 6 of the 8: 4 empty ones, and 2 kept
    harness.run()
    harness.add("again", PROMPT[:16], 1)
    harness.run()
    assert num_cached(harness, "again") == 8


def test_preempted_request_finds_its_own_blocks_and_counts_no_hit() -> None:
    harness = Harness(budget=16, num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=24)
    for name in "abc":
        harness.add(name, [ord(name) % 90] * 7, 14)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.num_preemptions > 0 and counters.num_prefix_hits == 0
    assert counters.num_prompt_tokens == 21
    for name in "abc":
        assert harness.tokens(name) == expected_output([ord(name) % 90] * 7, 14, [])


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which beginning
        st.integers(0, 14),  # how much of it
        st.lists(st.integers(0, 3), min_size=1, max_size=6),  # what follows
        st.integers(1, 12),  # max_tokens
        st.integers(0, 4),  # steps before it comes
        st.booleans(),  # aborted after a while
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    budget=st.integers(1, 20),
    num_blocks=st.integers(9, 40),
    window=st.sampled_from([None, *map(Window, (1, 2, 4, 5, 9)), Window(6, True), Window(8, True)]),
)
def test_outputs_are_those_of_each_request_alone(
    requests: list[Any], budget: int, num_blocks: int, window: Window | None
) -> None:
    harness = Harness(
        budget=budget, num_blocks=num_blocks, block_size=4, max_model_len=36, window=window
    )
    aborted = []
    for number, (which, length, rest, max_tokens, steps, is_aborted) in enumerate(requests):
        prompt = [which] * length + rest
        name = str(number)
        harness.add(name, prompt, max_tokens)
        for _ in range(steps):
            if harness.scheduler.has_requests:
                harness.step()
        if is_aborted:
            harness.scheduler.abort([name])
            aborted.append(name)
    harness.run()
    for number, (which, length, rest, max_tokens, _, _) in enumerate(requests):
        if str(number) not in aborted:
            expected = expected_output([which] * length + rest, max_tokens, [])
            assert harness.tokens(str(number)) == expected
    assert harness.blocks.num_used_blocks == 0
    if harness.blocks.window_blocks is not None:
        assert harness.blocks.window_blocks.num_used_blocks == 0


def test_keys_are_those_of_whole_prefixes() -> None:
    keys: list[bytes] = []
    extend_keys(keys, None, [1, 2, 3, 4, 5], 2)
    assert len(keys) == 2
    grown = list(keys)
    extend_keys(grown, None, [1, 2, 3, 4, 5, 6], 2)
    assert grown[:2] == keys and len(grown) == 3
    others: list[list[bytes]] = []
    for salt, tokens in (("s", [1, 2, 3, 4]), (None, [2, 1, 3, 4]), (None, [3, 4, 1, 2])):
        other: list[bytes] = []
        extend_keys(other, salt, tokens, 2)
        others.append(other)
    assert not set(keys) & {key for other in others for key in other}


def test_pool_gives_empty_blocks_before_kept_ones() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.name(first, b"a")
    pool.release(first)
    pool.release(second)
    assert pool.num_free == 3 and pool.find(b"a") == first
    assert {pool.take(), pool.take()} == {0, 1, 2} - {first}
    assert pool.take() == first and pool.find(b"a") is None


def test_memory_of_prefixes_is_bounded_and_forgets_the_oldest() -> None:
    memory = PrefixMemory(3)
    memory.use([b"a", b"b"])
    memory.use([b"c", b"d"])
    assert memory.num_known([b"a"]) == 0 and memory.num_known([b"b", b"c", b"d", b"e"]) == 3
    memory.clear()
    assert memory.num_known([b"b"]) == 0
