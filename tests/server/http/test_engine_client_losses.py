"""The client of the engines while the group is formed anew: what it holds, and how that goes on."""

import asyncio
import dataclasses
from typing import Any

import pytest

from moed.server import engine_client
from moed.server.engine_client import GenerationFailed, Submission
from moed.server.messages import AddRequest, PauseRequests, Wake
from tests.server.http.client_bench import Bench, received
from tests.server_config import SERVER


def lose(bench: Bench, epoch: int) -> None:
    """What the front end does when the launcher tells of a loss."""
    bench.health.recover(1, "rank 1 ended")
    bench.client.hold(epoch)
    bench.channel.sent.clear()


def return_all(bench: Bench) -> None:
    for rank in range(2):
        bench.become_ready(rank)


def give(bench: Bench, request: AddRequest, index: int, tokens: list[int], **more: Any) -> None:
    rank = next(rank for rank, message in bench.channel.sent if message is request)
    bench.output(rank, request.request_id, output_index=index, token_ids=tokens, **more)


def sent(bench: Bench, kind: type) -> list[Any]:
    return [message for _, message in bench.channel.sent if isinstance(message, kind)]


async def test_requests_go_on_from_the_tokens_that_are_there(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    submission = bench.submit(2)
    first, second = bench.added
    give(bench, first, 0, [7, 8])
    lose(bench, 1)
    # Nothing is told to a group that is not there, and what the old one still says is dropped.
    bench.output(0, first.request_id, epoch=0, output_index=2, token_ids=[9])
    assert bench.channel.epoch == 1 and bench.channel.sent == []
    bench.become_ready(1)
    assert bench.channel.sent == []
    bench.become_ready(0)
    again = {message.request_id: message for message in sent(bench, AddRequest)}
    assert again.keys() == {first.request_id, second.request_id}
    assert again[first.request_id].output_token_ids == [7, 8]
    assert again[second.request_id].output_token_ids == []
    assert all(message.epoch == 1 for message in again.values())
    assert [type(message) for _, message in bench.channel.sent[-2:]] == [Wake, Wake]
    give(bench, again[first.request_id], 2, [9], epoch=1)
    assert received(submission) == [(0, [7, 8]), (0, [9])]


async def test_requests_that_come_in_between_wait(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    lose(bench, 1)
    bench.submit(1, rank=1)
    assert bench.channel.sent == []
    return_all(bench)
    assert [rank for rank, message in bench.channel.sent if isinstance(message, AddRequest)] == [1]
    assert sent(bench, AddRequest)[0].epoch == 1


async def test_what_is_aborted_in_between_does_not_come_back(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    gone, kept = bench.submit(), bench.submit()
    lose(bench, 1)
    gone.close()
    assert bench.channel.sent == [] and bench.client.num_open == 1
    return_all(bench)
    assert len(sent(bench, AddRequest)) == 1 and len(kept.open) == 1
    kept.close()
    assert bench.client._balancer.loads == [0, 0]


async def test_a_loss_on_the_way_begins_again(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    bench.submit()
    lose(bench, 1)
    bench.become_ready(0)
    lose(bench, 2)
    bench.become_ready(1)
    assert bench.channel.sent == []
    bench.become_ready(0)
    assert [message.epoch for message in sent(bench, AddRequest)] == [2]


async def test_what_is_paused_stays_paused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD_OUTPUTS", 3)
    bench = Bench(tmp_path)
    slow, quick = bench.submit(), bench.submit()
    of_slow, of_quick = bench.added
    for index in range(3):
        give(bench, of_slow, index, [index])
    assert slow.is_paused and not quick.is_paused
    lose(bench, 1)
    return_all(bench)
    assert [m.request_ids for m in sent(bench, PauseRequests)] == [[of_slow.request_id]]
    kinds = [type(message) for _, message in bench.channel.sent]
    assert kinds.index(PauseRequests) > max(
        place for place, kind in enumerate(kinds) if kind is AddRequest
    )


async def test_one_that_reads_again_in_between_is_not_paused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD_OUTPUTS", 3)
    bench = Bench(tmp_path)
    slow = bench.submit()
    for index in range(3):
        give(bench, bench.added[0], index, [index])
    lose(bench, 1)
    await slow.take(3)
    assert not slow.is_paused
    return_all(bench)
    assert sent(bench, PauseRequests) == []


async def fails(submission: Submission, words: str) -> None:
    with pytest.raises(GenerationFailed, match=words):
        async with asyncio.timeout(5):
            await submission.take(1)


def lose_twice(bench: Bench) -> None:
    for epoch in (1, 2):
        lose(bench, epoch)
        return_all(bench)


async def test_what_may_end_the_ranks_goes_on_alone(tmp_path: Any) -> None:
    """The newest first; when that is what ends them, the others are in the clear."""
    bench = Bench(tmp_path)
    others, suspect = [bench.submit(), bench.submit()], bench.submit()
    lose(bench, 1)
    return_all(bench)
    assert len(bench.added) == 3
    lose(bench, 2)
    return_all(bench)
    assert [message.request_id for message in bench.added] == [suspect.open[0].request_id]
    late = bench.submit()
    assert len(bench.added) == 1
    lose(bench, 3)
    await fails(suspect, "3 times in a row")
    return_all(bench)
    going_on = {other.open[0].request_id for other in [*others, late]}
    assert {message.request_id for message in bench.added} == going_on
    for message in bench.added:
        give(bench, message, 0, [5], epoch=3)
    assert [received(other) for other in others] == [[(0, [5])], [(0, [5])]]


async def test_each_goes_on_once_the_one_before_it_has_a_token(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    first, second, third = bench.submit(), bench.submit(), bench.submit()
    lose_twice(bench)
    late = bench.submit()
    give(bench, bench.added[0], 0, [5], epoch=2)
    assert [m.request_id for m in bench.added][1:] == [second.open[0].request_id]
    give(bench, bench.added[0], 1, [6], epoch=2)  # of one that is in the clear already
    first.close()
    assert len(bench.added) == 2
    second.close()
    assert [m.request_id for m in bench.added][2:] == [late.open[0].request_id]
    assert received(third) == [(0, [5]), (0, [6])]
    assert bench.client.num_open == 2


async def test_a_token_in_between_clears_a_request(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    bench.submit()
    for epoch in range(1, 5):
        lose(bench, epoch)
        return_all(bench)
        assert len(bench.added) == 1
        give(bench, bench.added[0], epoch - 1, [5], epoch=epoch)
    assert bench.client.num_open == 1


async def test_a_group_that_never_stood_casts_no_doubt(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    bench.submit(2)
    for epoch in range(1, 5):
        lose(bench, epoch)
        bench.become_ready(0)
    bench.become_ready(1)
    assert len(bench.added) == 2


async def test_what_is_paused_casts_no_doubt(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run, so it ends nothing."""
    monkeypatch.setattr(engine_client, "MAX_UNREAD_OUTPUTS", 2)
    bench = Bench(tmp_path)
    slow = bench.submit()
    for index in range(2):
        give(bench, bench.added[0], index, [5])
    other = bench.submit()
    lose_twice(bench)
    assert [m.request_id for m in bench.added] == [other.open[0].request_id]
    give(bench, bench.added[0], 0, [5], epoch=2)
    assert [m.request_id for m in bench.added][1:] == [slow.open[0].request_id]
    assert [m.request_ids for m in sent(bench, PauseRequests)] == [[slow.open[0].request_id]]


async def test_every_hold_has_its_bound(tmp_path: Any) -> None:
    """A second loss after the first bound is over holds requests again, and no longer."""
    bench = Bench(tmp_path, recovery=dataclasses.replace(SERVER.recovery, recovery_timeout_s=0.05))
    first = bench.submit()
    lose(bench, 1)
    await fails(first, "within 0.05 s .recovery_timeout.")
    assert not bench.health.holds_requests
    lose(bench, 2)
    assert bench.health.holds_requests
    await fails(bench.submit(), "recovery_timeout")
    return_all(bench)
    assert bench.health.is_ready and bench.client.num_open == 0
