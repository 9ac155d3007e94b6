"""Exchanges through memory that ranks of one host share: whole, bounded, and with nothing left."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest

from moed.config.errors import PeerLost
from moed.dist.groups import Groups, collective_errors
from moed.dist.host import channel as host
from moed.dist.host.channel import HostChannel, open_channel
from moed.dist.record_exchange import HostExchange, SharedExchange, make_exchange
from tests.worker_pool import WorkerPool, WorkersFailed

pytestmark = pytest.mark.skipif(host.functions() is None, reason="the exchange was not built")

NUM_FIELDS = 3


def records(groups: Groups, num_rounds: int) -> list[list[int]]:
    """Rounds in which a rank's pace differs from the others'; whatever came out wrong."""
    exchange = make_exchange(groups, "gloo", NUM_FIELDS)
    assert isinstance(exchange, SharedExchange)
    wrong = []
    for turn in range(num_rounds):
        if turn % 97 == 31 * groups.rank:
            time.sleep(0.003)  # longer than anyone looks without a pause
        rows = exchange.exchange([turn, groups.rank, turn * 10 + groups.rank])
        if rows != [[turn, rank, turn * 10 + rank] for rank in range(groups.world_size)]:
            wrong.append([turn, *rows[0]])
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_records_of_every_round_arrive_whole(
    workers: Callable[[int], WorkerPool], world_size: int
) -> None:
    assert workers(world_size).run(records, 2000) == [[]] * world_size


def numbers_go_round(groups: Groups) -> bool:
    """Past the largest number that 32 bits hold."""
    exchange = make_exchange(groups, "gloo", 1)
    assert isinstance(exchange, SharedExchange)
    channel = exchange._channel
    channel._struct.number = 2**32 - 4
    # As if so many exchanges had been: the flags say it too, before anyone looks.
    for region in channel._regions:
        ctypes.c_uint32.from_address(region or 0).value = 2**32 - 4
    same = [exchange.exchange([turn]) == [[turn]] * groups.world_size for turn in range(9)]
    return all(same)


def test_the_count_of_exchanges_may_overflow(workers: Callable[[int], WorkerPool]) -> None:
    assert workers(2).run(numbers_go_round) == [True, True]


def between_hosts(groups: Groups) -> bool:
    with mock.patch.object(groups, "is_single_node", False):
        return isinstance(make_exchange(groups, "gloo", 1), HostExchange)


def one_without(groups: Groups) -> list[bool]:
    """Rank 1 has nothing built; then its descriptors cannot be opened; then all is well."""
    found = []
    nothing = mock.patch.object(host, "functions", lambda: None)
    with nothing if groups.rank == 1 else mock.MagicMock():
        found.append(open_channel(groups, 8) is None)
    real = os.open

    def refused(path: str, flags: int) -> int:
        if path.startswith("/proc/"):
            raise PermissionError(path)
        return real(path, flags)

    with mock.patch.object(os, "open", refused) if groups.rank == 1 else mock.MagicMock():
        found.append(open_channel(groups, 8) is None)
    found.append(open_channel(groups, 8) is not None)
    return found


def test_gloo_where_shared_memory_cannot_be(workers: Callable[[int], WorkerPool]) -> None:
    """All ranks alike, also those that could."""
    assert workers(2).run(between_hosts) == [True, True]
    assert workers(2).run(one_without) == [[True, True, True]] * 2


def message_of(channel: HostChannel, exchange: Callable[[], object]) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught, collective_errors("a test"):
        exchange()
    return str(caught.value), time.monotonic() - started


def wait_in_vain(groups: Groups, reason: str) -> tuple[str, float]:
    """Rank 1 does not come: it is late, leaves in order, or is killed."""
    with mock.patch.object(groups, "timeout_s", 0.5):
        exchange = make_exchange(groups, "gloo", 1)
    assert isinstance(exchange, SharedExchange)
    channel = exchange._channel
    exchange.exchange([1])
    if groups.rank == 1:
        time.sleep(0.2)
        if reason == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if reason == "left":
            groups.close()
        time.sleep(0.8)
        return "", 0.0
    return message_of(channel, lambda: exchange.exchange([2]))


@pytest.mark.parametrize(
    ("reason", "message", "least", "most"),
    [
        ("late", "rank 1 did not come within 0.5 s", 0.4, 3),
        ("left", "rank 1 has left", 0.1, 0.45),
        ("killed", "rank 1 has ended", 0.1, 0.45),
    ],
)
def test_nobody_waits_for_ever(reason: str, message: str, least: float, most: float) -> None:
    pool = WorkerPool(2)
    try:
        if reason == "killed":
            with pytest.raises(WorkersFailed) as caught:
                pool.run(wait_in_vain, reason)
            found, seconds = caught.value.results[0]
        else:
            found, seconds = pool.run(wait_in_vain, reason)[0]
    finally:
        pool.close()
    assert f"Reason: {message}" in found
    assert least < seconds < most + 2  # a busy machine takes its time


def leave_nothing(groups: Groups) -> tuple[int, int]:
    """Open descriptors before and after channels that were closed."""
    open_channel(groups, 8)  # what is opened once for all
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        channel = open_channel(groups, 1000)
        assert channel is not None
        channel.close()
        channel.close()
        with pytest.raises(RuntimeError, match="has left"):
            channel.run(channel.calls.exchange_records, None, 0, None)
    return before, len(os.listdir("/proc/self/fd"))


def test_descriptors_are_given_back(workers: Callable[[int], WorkerPool]) -> None:
    for before, after in workers(2).run(leave_nothing):
        assert before == after
