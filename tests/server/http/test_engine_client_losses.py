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


async def test_one_in_three_losses_in_a_row_is_not_tried_again(tmp_path: Any) -> None:
    bench = Bench(tmp_path)
    suspect, other = bench.submit(), bench.submit()
    for epoch in (1, 2, 3):
        lose(bench, epoch)
        return_all(bench)
        if epoch < 3:
            give(bench, sent(bench, AddRequest)[1], epoch - 1, [5], epoch=epoch)
    await fails(suspect, "3 times in a row")
    assert [len(other.open), bench.client.num_open] == [1, 1]


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
