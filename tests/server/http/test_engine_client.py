"""The client of the engines: order of messages, duplicates, older epochs, lost tokens."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from moed.server.engine_client import (
    ChoiceSpec,
    GenerationFailed,
    QueueFull,
    drop_duplicates,
)
from moed.server.messages import (
    AbortRequests,
    AddRequest,
    ForgetPrefixes,
    RankReady,
    Shutdown,
    TokenOutput,
    Wake,
)
from tests.server.http.client_bench import ORIGIN, PARAMS, Bench, received


@pytest.fixture
def bench(tmp_path: Any) -> Iterator[Bench]:
    yield Bench(tmp_path)


def test_rank_gets_its_request_first_and_then_all_are_woken(bench: Bench) -> None:
    bench.submit(1, rank=1)
    kinds = [(rank, type(message)) for rank, message in bench.channel.sent]
    assert kinds == [(1, AddRequest), (0, Wake), (1, Wake)]
    bench.submit(2)
    numbers = [m.number for _, m in bench.channel.sent if isinstance(m, Wake)]
    assert numbers == [1, 1, 2, 2]
    # One wake for all choices of a request, after the last of them.
    assert [type(m) for _, m in bench.channel.sent[3:]] == [AddRequest, AddRequest, Wake, Wake]


def test_abort_is_sent_before_the_wake_and_only_once(bench: Bench) -> None:
    submission = bench.submit(3)
    request_ids = [request.request_id for request in bench.added]
    bench.channel.sent.clear()
    submission.close()
    submission.close()
    messages = [message for _, message in bench.channel.sent]
    kinds = [type(message) for message in messages]
    assert kinds == [AbortRequests, AbortRequests, Wake, Wake]
    aborted = [i for m in messages if isinstance(m, AbortRequests) for i in m.request_ids]
    assert sorted(aborted) == sorted(request_ids)
    assert bench.client.num_open == 0


def test_repeated_tokens_are_dropped(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    request_id = bench.added[0].request_id
    bench.output(0, request_id, output_index=0, token_ids=[10])
    bench.output(0, request_id, output_index=0, token_ids=[10])
    bench.output(0, request_id, output_index=0, token_ids=[10, 11, 12])
    bench.output(0, request_id, output_index=1, token_ids=[11, 12])
    bench.output(0, request_id, output_index=3, token_ids=[13], finish_reason="length")
    assert received(submission) == [(0, [10]), (0, [11, 12]), (0, [13])]
    assert bench.client.num_open == 0


def test_end_that_repeats_old_tokens_still_ends(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    request_id = bench.added[0].request_id
    bench.output(0, request_id, output_index=0, token_ids=[10, 11])
    bench.output(0, request_id, output_index=1, token_ids=[11], finish_reason="length")
    assert received(submission) == [(0, [10, 11]), (0, [])]
    assert bench.client.num_open == 0


def test_older_epochs_other_ranks_and_unknown_requests_are_dropped(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    request_id = bench.added[0].request_id
    bench.output(0, request_id, output_index=0, token_ids=[66], epoch=-1)
    bench.output(1, request_id, output_index=0, token_ids=[66])
    bench.output(0, "nobody", output_index=0, token_ids=[66])
    bench.output(0, request_id, output_index=0, token_ids=[10])
    assert received(submission) == [(0, [10])]


def test_outputs_after_an_abort_are_dropped(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    submission.close()
    bench.output(0, bench.added[0].request_id, output_index=0, token_ids=[10])
    assert received(submission) == []


def test_lost_tokens_are_an_error_and_free_the_request(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    request_id = bench.added[0].request_id
    bench.output(0, request_id, output_index=1, token_ids=[10])
    with pytest.raises(GenerationFailed, match="lost"):
        received(submission)
    assert (0, AbortRequests([request_id])) in bench.channel.sent


def test_error_of_an_engine_reaches_the_request_with_its_words(bench: Bench) -> None:
    submission = bench.submit(2, rank=0)
    bench.output(
        0,
        bench.added[1].request_id,
        output_index=0,
        token_ids=[],
        finish_reason="error",
        error="the KV cache is too small",
    )
    with pytest.raises(GenerationFailed, match="the KV cache is too small"):
        received(submission)


def test_balance_is_restored_however_a_request_ends(bench: Bench) -> None:
    loads = bench.client._balancer.loads
    first, second, third, fourth = (bench.submit(1, rank=0) for _ in range(4))
    assert loads == [4 * (3 + 10), 0]
    ids = [request.request_id for request in bench.added]
    bench.output(0, ids[0], output_index=0, token_ids=[1])
    # The prompt's three tokens and the one that came are done.
    assert loads == [52 - 4, 0]
    bench.output(0, ids[0], output_index=1, token_ids=[2], finish_reason="stop")
    bench.output(0, ids[1], output_index=0, token_ids=[], finish_reason="error", error="x")
    third.close()
    fourth.stop(0)
    assert loads == [0, 0]
    assert first.open == second.open == {}


def test_queue_has_a_bound(tmp_path: Any) -> None:
    # Two ranks run one request each, and two more may wait.
    bench = Bench(tmp_path, max_num_seqs=1, max_num_queued_requests=2)
    for _ in range(4):
        bench.submit()
    with pytest.raises(QueueFull, match="2 requests wait already") as caught:
        bench.submit()
    assert 1 <= caught.value.retry_after_s <= 60
    bench.output(0, bench.added[0].request_id, output_index=0, token_ids=[1], finish_reason="stop")
    bench.submit()


def test_losing_the_group_fails_everything_and_sends_nothing(bench: Bench) -> None:
    submissions = [bench.submit(), bench.submit(2)]
    bench.channel.sent.clear()
    bench.health.fail(1, "rank 1 is gone")
    assert bench.client.lose_group("rank 1 is gone") == 2
    for submission in submissions:
        with pytest.raises(GenerationFailed, match="rank 1 is gone"):
            received(submission)
    with pytest.raises(GenerationFailed, match="rank 1 is gone"):
        bench.submit()
    bench.client.shut_down()
    assert bench.channel.sent == []


def test_shutdown_is_sent_to_all_before_the_wake(bench: Bench) -> None:
    bench.client.shut_down()
    bench.client.shut_down()
    kinds = [(rank, type(message)) for rank, message in bench.channel.sent]
    assert kinds == [(0, Shutdown), (1, Shutdown), (0, Wake), (1, Wake)]


def test_context_is_bounded_by_the_smallest_kv_cache(bench: Bench) -> None:
    small = RankReady(rank=1, num_kv_blocks=8, block_size=16, max_model_len=512, startup_s={})
    bench.client.handle(small, lambda _: None)
    assert bench.client.context_length == 128


async def test_take_waits_for_an_output(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    waiting = asyncio.ensure_future(submission.take(8))
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.output(0, bench.added[0].request_id, output_index=0, token_ids=[10])
    ((index, output),) = await waiting
    assert (index, output.token_ids) == (0, [10])


async def test_all_that_is_there_is_taken_at_once_and_an_error_after_it(bench: Bench) -> None:
    submission = bench.submit(1, rank=0)
    for index in range(3):
        bench.output(0, bench.added[0].request_id, output_index=index, token_ids=[index])
    bench.client.fail_all("the end")
    assert [output.token_ids for _, output in await submission.take(2)] == [[0], [1]]
    assert [output.token_ids for _, output in await submission.take(2)] == [[2]]
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="the end"):
            await submission.take(2)


def test_nothing_new_is_dropped_whole() -> None:
    output = TokenOutput(request_id="r", epoch=0, output_index=2, token_ids=[5, 6])
    assert drop_duplicates(output, 2) is output
    assert drop_duplicates(output, 4) is None
    partly = drop_duplicates(output, 3)
    assert partly is not None and (partly.output_index, partly.token_ids) == (3, [6])


def test_choices_of_one_prompt_share_a_rank_and_its_prompt(bench: Bench) -> None:
    prompt, other = list(range(40)), list(range(100, 140))
    specs = [ChoiceSpec(prompt, PARAMS)] * 3 + [ChoiceSpec(other, PARAMS)] * 3
    bench.client.submit(specs, ORIGIN, 0, None, "salt")
    ranks = [rank for rank, message in bench.channel.sent if isinstance(message, AddRequest)]
    assert ranks == [0, 0, 0, 1, 1, 1]
    assert {request.cache_salt for request in bench.added} == {"salt"}
    # Two full blocks of 16 tokens are computed once.
    assert bench.client._balancer.loads == [3 * 10 + 40 + 8 + 8] * 2


def test_forgotten_prefixes_are_forgotten_by_every_rank(bench: Bench) -> None:
    bench.client.submit([ChoiceSpec(list(range(40)), PARAMS)], ORIGIN, 0, 1)
    bench.channel.sent.clear()
    bench.client.forget_prefixes()
    kinds = [(rank, type(message)) for rank, message in bench.channel.sent]
    assert kinds == [(0, ForgetPrefixes), (1, ForgetPrefixes), (0, Wake), (1, Wake)]
    bench.client.submit([ChoiceSpec(list(range(40)), PARAMS)], ORIGIN, 0, 1)
    assert bench.client._balancer.loads == [0, 2 * 50]
