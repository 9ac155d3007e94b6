"""Where torchrun's workers meet: its store may outlive them, and keeps what they have said."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from moed.config.errors import PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.dist.rendezvous import Introduction, Meeting, find_others

WAIT_S = 20.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Of an agent that starts its workers again and again."""
    store = HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    # Nobody listens on a port here.
    monkeypatch.setattr("moed.dist.rendezvous._await_port", lambda *_: None)
    return store


def environment(rank: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank, 2, 0, 1, "127.0.0.1", 1, "torchrun")


def come(rank: int, told: dict[str, str], timeout_s: float = WAIT_S, check: Any = None) -> Meeting:
    own = Introduction(f"host-{rank}", f"name-{rank}", {"model": "m"}, told)
    return find_others(environment(rank), None, own, timeout_s, check)[1]


class Gone(Exception):
    """A worker was killed."""


def start(pool: ThreadPoolExecutor, rank: int, number: int) -> "Future[Meeting]":
    return pool.submit(come, rank, {"number": str(number)} if rank == 0 else {})


def test_each_launch_meets_anew(store: HashStore) -> None:
    """Whoever of its ranks comes first, and whatever those before have said."""
    with ThreadPoolExecutor() as pool:
        for number, order in enumerate([(0, 1), (1, 0), (1, 0), (0, 1)]):
            meetings = [start(pool, rank, number) for rank in order]
            for meeting in meetings:
                assert meeting.result(WAIT_S).told == {"number": str(number)}


def test_ranks_do_not_meet_one_that_has_ended(store: HashStore) -> None:
    """Rank 0 has come and waited for rank 1, which never came; then both are started again."""
    is_killed = threading.Event()

    def check() -> None:
        if is_killed.is_set():
            raise Gone

    with ThreadPoolExecutor() as pool:
        old = pool.submit(come, 0, {"number": "0"}, WAIT_S, check)
        while store.num_keys() < 2:
            assert not old.done()
        is_killed.set()
        with pytest.raises(Gone):
            old.result(WAIT_S)
        other = start(pool, 1, 1)
        while not store.check(["launch-1/moed/rank-1"]):
            assert not other.done()
        first = start(pool, 0, 1)
        assert other.result(WAIT_S).told == first.result(WAIT_S).told == {"number": "1"}


def test_rank_0_is_waited_for_within_a_bound(store: HashStore) -> None:
    with pytest.raises(PeerLost, match="rank 0 did not come within 0.3 s"):
        come(1, {}, 0.3)


def test_a_rank_0_that_has_ended_is_waited_for_too(store: HashStore) -> None:
    with pytest.raises(PeerLost, match="did not come"):
        come(0, {"number": "0"}, 0.05)
    store.delete_key("launch-1/moed/failure")
    with pytest.raises(PeerLost, match="rank 0 .* did not come within 0.3 s"):
        come(1, {}, 0.3)
