"""What the scheduler promises: the budget, the order, exact counts, and blocks that come back."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.engine.fakes import VOCAB_SIZE, Harness, expected_output, next_token

pytestmark = pytest.mark.usefixtures("any_order")


def sizes(harness: Harness) -> list[dict[str, int]]:
    return [{s.request.request_id: s.num_tokens for s in step.requests} for step in harness.steps]


def test_prompts_go_in_pieces_and_decodes_go_first() -> None:
    harness = Harness(budget=8)
    harness.add("a", [1] * 6, 4)
    harness.step()
    harness.add("b", [2] * 20, 2)
    harness.run()
    # a: its prompt, then one token a step. b: what is left of 8 each time: 7 + 7 + 6, then 1.
    assert sizes(harness) == [
        {"a": 6},
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 6},
        {"b": 1},
    ]
    assert harness.scheduler.counters.max_step_tokens == 8


def test_whole_prompts_wait_for_a_step_that_holds_them() -> None:
    harness = Harness(budget=8, chunked=False)
    harness.add("a", [1] * 6, 1)
    harness.add("b", [2] * 5, 1)
    harness.add("c", [3] * 3, 1)
    harness.run()
    # b does not fit beside a, and c must not pass it.
    assert sizes(harness) == [{"a": 6}, {"b": 5, "c": 3}]


def test_partial_prefill_sends_nothing() -> None:
    harness = Harness(budget=4)
    harness.add("a", [1] * 10, 3)
    assert harness.step() == [] and harness.step() == []
    harness.run()
    assert [len(output.token_ids) for output in harness.outputs["a"]] == [1, 1, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_exactly_max_tokens_and_length(max_tokens: int) -> None:
    harness = Harness()
    harness.add("a", [1, 2, 3], max_tokens)
    harness.run()
    assert harness.tokens("a") == expected_output([1, 2, 3], max_tokens, [])
    assert len(harness.tokens("a")) == max_tokens
    assert harness.finish_reason("a") == "length"


def test_stop_token_ends_and_is_sent() -> None:
    output = expected_output([5], 20, [])
    stop = output[3]
    first = output.index(stop)
    harness = Harness()
    harness.add("a", [5], 20, stop_token_ids=[stop])
    harness.run()
    assert harness.tokens("a") == output[: first + 1]
    assert harness.finish_reason("a") == "stop"
    assert harness.outputs["a"][-1].stop_token_id == stop


def test_stop_token_at_the_last_allowed_token_is_a_stop() -> None:
    output = expected_output([5], 1, [])
    harness = Harness()
    harness.add("a", [5], 1, stop_token_ids=output)
    harness.run()
    assert harness.finish_reason("a") == "stop"


def test_no_tokens_wanted_and_nothing_to_score_ends_at_once() -> None:
    harness = Harness()
    harness.add("a", [1, 2, 3], 0)
    assert harness.finish_reason("a") == "length" and harness.tokens("a") == []
    assert not harness.scheduler.has_requests


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_whole_or_in_pieces(budget: int) -> None:
    prompt = list(range(10, 20))
    harness = Harness(budget=budget)
    harness.add("scored", prompt, 0, prompt_logprobs=0)
    harness.add("continued", prompt, 2, prompt_logprobs=0)
    harness.run()
    for name, count in (("scored", 0), ("continued", 2)):
        first, *others = harness.outputs[name]
        assert first.prompt_logprobs is not None
        # Position i - 1 scores token i.
        found = [(e.logprob, e.rank) for e in first.prompt_logprobs[1:] if e is not None]
        assert first.prompt_logprobs[0] is None
        assert found == [(-float(i - 1), prompt[i]) for i in range(1, 10)]
        assert all(output.prompt_logprobs is None for output in others)
        assert len(harness.tokens(name)) == count and harness.finish_reason(name) == "length"


def test_prompt_logprobs_are_sent_once_though_the_request_is_preempted() -> None:
    harness = Harness(budget=16, num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=24)
    for name in "abc":
        harness.add(name, [ord(name) % VOCAB_SIZE] * 7, 14, prompt_logprobs=0)
    harness.run()
    assert harness.scheduler.counters.num_preemptions > 0
    for name in "abc":
        sent = [o for o in harness.outputs[name] if o.prompt_logprobs is not None]
        assert len(sent) == 1 and sent[0].output_index == 0
        assert sent[0].prompt_logprobs is not None and len(sent[0].prompt_logprobs) == 7
        assert harness.tokens(name) == expected_output([ord(name) % VOCAB_SIZE] * 7, 14, [])
    # Each prompt token counts once, though some were computed again.
    assert harness.scheduler.counters.num_prompt_tokens == 21


def test_prompt_logprobs_known_before_preemption_are_not_made_again(any_order: bool) -> None:
    harness = Harness(budget=4, num_blocks=12, block_size=4)
    harness.add("a", [1] * 3, 20)
    harness.step()
    # In pieces of 3 beside a's decodes, until a needs a second block more than was left over.
    prompt = list(range(40))
    harness.add("b", prompt, 1, prompt_logprobs=0)
    pieces: list[range] = []
    while harness.scheduler.has_requests:
        harness.step()
        of_b = [s for s in harness.steps[-1].requests if s.request.request_id == "b"]
        pieces += [s.prompt_logprob_positions for s in of_b]
    assert harness.scheduler.counters.num_preemptions == 1
    # Every position once, in order, though the first ones were computed twice. One step ahead, the
    # piece that was under way is made again.
    made = [position for piece in pieces for position in piece]
    assert sorted(set(made)) == list(range(39)) and len(made) <= 39 + 3 * any_order
    assert range(0) in [range(len(piece)) for piece in pieces]
    (output,) = harness.outputs["b"]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 40


def test_length_limit_leaves_one_token_for_the_longest_prompt() -> None:
    harness = Harness(max_model_len=12, num_blocks=8)
    harness.add("fits", [1] * 11, 100)
    harness.add("full", [1] * 12, 1)
    harness.run()
    assert len(harness.tokens("fits")) == 1 and harness.finish_reason("fits") == "length"
    assert harness.finish_reason("full") == "error"
    assert "12" in str(harness.outputs["full"][0].error)


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ([], {}, "empty"),
        ([1, VOCAB_SIZE], {}, str(VOCAB_SIZE)),
        ([-1], {}, "-1"),
        ([2**63 - 1], {}, str(2**63 - 1)),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, str(VOCAB_SIZE)),
        ([1], {"output_token_ids": [-5]}, "-5"),
    ],
)
def test_bad_requests_get_an_error_and_harm_nobody(
    prompt: list[int], more: dict[str, Any], words: str
) -> None:
    harness = Harness()
    harness.add("good", [1, 2], 3)
    harness.add("bad", prompt, 3, **more)
    assert harness.finish_reason("bad") == "error" and words in str(harness.outputs["bad"][0].error)
    harness.run()
    assert harness.tokens("good") == expected_output([1, 2], 3, [])


def test_request_beyond_all_blocks_is_refused_with_the_numbers() -> None:
    harness = Harness(num_blocks=4, block_size=4, max_model_len=64)
    harness.add("a", [1] * 10, 7)
    assert "17 tokens need 5 KV blocks" in str(harness.outputs["a"][0].error)
    harness.add("b", [1] * 10, 6)
    harness.run()
    assert len(harness.tokens("b")) == 6


def test_whole_prompt_beyond_the_budget_is_refused_and_the_next_one_served() -> None:
    harness = Harness(budget=8, chunked=False)
    harness.add("long", [1] * 9, 1)
    harness.add("short", [1] * 2, 1)
    harness.run()
    assert "9 tokens" in str(harness.outputs["long"][0].error)
    assert harness.tokens("short") == expected_output([1, 1], 1, [])


def test_same_id_twice_is_refused_while_the_first_lives() -> None:
    harness = Harness()
    harness.add("a", [1], 2)
    second = harness.scheduler.add(make("a", [2], 2))
    assert second is not None and second.finish_reason == "error"
    harness.run()
    assert harness.tokens("a") == expected_output([1], 2, [])
    harness.add("a", [2], 2)
    harness.run()
    assert harness.tokens("a") == expected_output([2], 2, [])


def make(request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    from tests.server.engine.fakes import make_request

    return make_request(request_id, prompt, max_tokens, **more)


def test_abort_in_any_state_frees_blocks_at_once() -> None:
    harness = Harness(budget=4, max_num_seqs=2)
    harness.add("decoding", [1], 50)
    harness.step()
    harness.add("prefilling", [2] * 30, 5)
    harness.add("queued", [3], 5)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 1)
    harness.scheduler.abort(["queued", "never seen"])
    assert harness.scheduler.num_waiting == 0
    harness.scheduler.abort(["decoding", "prefilling"])
    assert harness.blocks.num_used_blocks == 0 and not harness.scheduler.has_requests
    # Too late, and twice: ignored.
    harness.scheduler.abort(["decoding"])
    assert harness.scheduler.counters.num_aborted == 3
    harness.add("queued", [4], 2)
    harness.run()
    assert harness.tokens("queued") == expected_output([4], 2, [])


def test_lower_priority_number_first_and_first_come_within_it() -> None:
    harness = Harness(budget=4, max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        harness.add(name, [1] * 4, 1, priority=priority)
    harness.run()
    order = [step.requests[0].request.request_id for step in harness.steps]
    assert order == ["urgent", "first", "second", "late"]


def test_preemption_takes_the_last_in_order_and_changes_no_output() -> None:
    harness = Harness(budget=16, num_blocks=6, block_size=4, max_num_seqs=3, max_model_len=24)
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        harness.add(name, [ord(name) % VOCAB_SIZE] * 3, 20, priority=priority)
    preempted = []
    while harness.scheduler.has_requests:
        before = set(running(harness))
        outputs = harness.step()
        ended = {output.request_id for output in outputs if output.finish_reason}
        preempted += sorted(before - set(running(harness)) - ended)
    # b is first in the order: never it; c came last.
    assert preempted[0] == "c" and "b" not in preempted
    for name in "abc":
        assert harness.outputs[name][-1].num_preemptions == preempted.count(name)
        assert not any(output.num_preemptions for output in harness.outputs[name][:-1])
    for name in "abc":
        assert harness.tokens(name) == expected_output([ord(name) % VOCAB_SIZE] * 3, 20, [])
        assert all(output.num_cached_tokens == 0 for output in harness.outputs[name])
    assert harness.blocks.num_used_blocks == 0


def running(harness: Harness) -> list[str]:
    return [request.request_id for request in harness.scheduler._running]


def test_resumed_request_goes_on_as_if_undisturbed() -> None:
    whole = expected_output([9, 8, 7], 10, [])
    harness = Harness(budget=4)
    harness.add("a", [9, 8, 7], 10, output_token_ids=whole[:6], prompt_logprobs=1, epoch=3)
    harness.run()
    sent = [token for output in harness.outputs["a"] for token in output.token_ids]
    assert sent == whole[6:]
    assert [output.output_index for output in harness.outputs["a"]] == [6, 7, 8, 9]
    assert all(o.epoch == 3 and o.prompt_logprobs is None for o in harness.outputs["a"])
    assert harness.finish_reason("a") == "length"


def test_resumed_request_that_had_ended_ends_again_without_a_token() -> None:
    harness = Harness()
    harness.add("length", [1], 2, output_token_ids=[4, 5])
    harness.add("stop", [1], 9, output_token_ids=[4, 5], stop_token_ids=[5])
    assert harness.finish_reason("length") == "length"
    assert harness.finish_reason("stop") == "stop"
    assert harness.outputs["stop"][0].stop_token_id == 5
    assert harness.outputs["stop"][0].token_ids == []


def test_min_tokens_postpones_a_stop() -> None:
    output = expected_output([5], 8, [])
    harness = Harness()
    # The fake model ignores the mask of the sampler: what counts is that it does not end early.
    harness.add("a", [5], 8, stop_token_ids=output[:2], min_tokens=5)
    harness.run()
    assert len(harness.tokens("a")) >= 5


def test_a_step_costs_little_with_ten_thousand_queued() -> None:
    harness = Harness(budget=64, max_num_seqs=32, num_blocks=512)
    for number in range(10_000):
        harness.add(str(number), [number % VOCAB_SIZE] * 3, 4)
    scheduler = harness.scheduler
    scheduler.abort([str(number) for number in range(40, 10_000, 3)])
    started = time.process_time()
    for _ in range(100):
        harness.step()
        assert scheduler.num_queued_tokens > 0 and scheduler.has_requests
    # A pass over the queue in each step would take several times as long.
    assert time.process_time() - started < 1.0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it comes
        st.integers(1, 30),  # prompt tokens
        st.integers(0, 20),  # max_tokens
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.integers(0, 12)),  # steps after which it is aborted
        st.booleans(),  # prompt_logprobs
        st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=12),  # stop tokens
        st.integers(0, 8),  # tokens that another engine has already made
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=ARRIVALS,
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(8, 20),
    chunked=st.booleans(),
)
def test_any_load_keeps_the_budget_ends_and_equals_solo(
    arrivals: list[tuple[int, int, int, int, int | None, bool, set[int], int]],
    budget: int,
    max_num_seqs: int,
    num_blocks: int,
    chunked: bool,
) -> None:
    harness = Harness(
        budget=budget,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=32,
        chunked=chunked,
    )
    aborts: dict[int, list[str]] = {}
    for number, entry in enumerate(arrivals):
        gap, length, max_tokens, priority, abort, scored, stops, made = entry
        for _ in range(gap):
            if harness.scheduler.has_requests:
                harness.step()
            harness.scheduler.abort(aborts.pop(len(harness.steps), []))
        name = str(number)
        prompt = [(number * 7 + i) % VOCAB_SIZE for i in range(length)]
        output = expected_output(prompt, min(made, max_tokens, 32 - length), list(stops))
        more: dict[str, Any] = {"stop_token_ids": sorted(stops)}
        if scored:
            more["prompt_logprobs"] = 0
        harness.add(name, prompt, max_tokens, priority=priority, output_token_ids=output, **more)
        if abort is not None:
            aborts.setdefault(len(harness.steps) + abort, []).append(name)
    aborted: set[str] = set()
    while harness.scheduler.has_requests:
        harness.step()
        names = aborts.pop(len(harness.steps), [])
        aborted.update(names)
        harness.scheduler.abort(names)
        assert len(harness.steps) < 5000
    assert harness.blocks.num_used_blocks == 0
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    assert harness.scheduler.num_queued_tokens == 0
    for number, entry in enumerate(arrivals):
        _, length, max_tokens, _, abort, scored, stops, made = entry
        prompt = [(number * 7 + i) % VOCAB_SIZE for i in range(length)]
        whole = expected_output(prompt, min(max_tokens, 32 - length), list(stops))
        outputs = harness.outputs[str(number)]
        skipped = len(expected_output(prompt, min(made, max_tokens, 32 - length), list(stops)))
        sent = [token for output in outputs for token in output.token_ids]
        if outputs and outputs[-1].finish_reason == "error":
            assert not chunked and length > budget
        elif abort is None:
            is_stop = bool(whole) and whole[-1] in stops
            assert sent == whole[skipped:]
            assert outputs[-1].finish_reason == ("stop" if is_stop else "length")
            scores = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
            assert [len(score) for score in scores] == ([length] if scored and not skipped else [])
        else:
            assert sent == whole[skipped : skipped + len(sent)]


def test_the_fake_model_depends_on_every_token() -> None:
    assert next_token([1, 2, 3]) != next_token([3, 2, 1])
    assert next_token([0] * 4) != next_token([0] * 5)
