"""Lost, hanging and missing peers become a sentence within a bound, and closing never hangs."""

import dataclasses
import datetime
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from moed.config.errors import PeerLost
from moed.config.expert_placement import ExpertPlacement
from moed.dist import groups as groups_module
from moed.dist.agreement import Agreement, RankState, gather_ints
from moed.dist.all2all.base import All2AllBackend
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups, collective_errors, init_groups
from moed.dist.host.channel import functions
from moed.dist.launch import LaunchEnvironment
from moed.dist.registry import create_backend
from moed.dist.rendezvous import open_store
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool, WorkersFailed

ALONE = LaunchEnvironment(0, 1, 0, 1, "127.0.0.1", 0, "moed")


@pytest.fixture
def pool_of() -> Iterator[Callable[[int], WorkerPool]]:
    """Pools of this test's own: their ranks do not survive it."""
    pools: list[WorkerPool] = []

    def start(world_size: int) -> WorkerPool:
        pools.append(WorkerPool(world_size))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def timed(function: Callable[[], object]) -> tuple[str, float]:
    """What `function` says of a lost peer, and after how many seconds."""
    started = time.monotonic()
    try:
        function()
    except PeerLost as error:
        return str(error), time.monotonic() - started
    return "no error", time.monotonic() - started


def backend_of(groups: Groups, name: str) -> All2AllBackend:
    placement, cpu = ExpertPlacement.linear(4, 2), torch.device("cpu")
    fused_moe = engine_config(ranks=2).fused_moe
    return create_backend(name, groups, placement, fused_moe, torch.float32, cpu)


def dispatch(groups: Groups, backend: All2AllBackend) -> None:
    """Four rows for each of two ranks."""
    metadata = DPMetadata(torch.tensor([4, 4], dtype=torch.int32), groups.rank, 0)
    ids = torch.arange(8).view(4, 2) % 4
    backend.dispatch(torch.zeros(4, 32), ids, torch.ones(4, 2), metadata)


def lose_a_peer(groups: Groups) -> list[tuple[str, float]]:
    """Rank 1 dies once rank 0 waits for it."""
    agreement = Agreement(groups, engine_config(ranks=2).parallel, 1)
    agreement.agree(6, 0, RankState.IDLE, 0)
    names = ("all2allv", "allgather_reducescatter")
    backends = [backend_of(groups, name) for name in names]
    with mock.patch.object(groups, "is_single_node", False):
        backends.append(backend_of(groups, "all2allv"))
    if groups.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        timed(lambda: agreement.agree(7, 0, RankState.IDLE, 0)),
        timed(lambda: gather_ints(groups, 1)),
        *(timed(lambda backend=backend: dispatch(groups, backend)) for backend in backends),  # type: ignore[misc]
        timed(groups.close),
        timed(groups.close),
    ]


def test_a_killed_peer_is_noticed_at_once_and_the_collective_named(
    pool_of: Callable[[int], WorkerPool],
) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool_of(2).run(lose_a_peer)
    assert caught.value.errors == {1: "killed by SIGKILL"}
    answers = caught.value.results[0]
    collectives = [
        "agreement of step 7",
        "gather of a number",
        "dispatch of rows" if functions() else "exchange of row counts",
        "all-gather of rows",
        "exchange of row counts",
    ]
    for (message, seconds), collective in zip(answers, collectives, strict=False):
        assert f"collective '{collective}' failed" in message
        assert "look for that rank's own error first" in message
        assert seconds < 10
    for message, seconds in answers[len(collectives) :]:
        assert message == "no error" and seconds < 6


def wait_for_a_hanging_peer(groups: Groups) -> tuple[str, float]:
    """Rank 1 does not come; the bound is 1 s instead of the group's own."""
    bounded = dist.new_group(timeout=datetime.timedelta(seconds=1))
    groups_with_bound = Groups(ALONE, "cpu", bounded, bounded, bounded, None, 1, 1.0)
    groups_with_bound.world_size = 2
    answer = timed(lambda: gather_ints(groups_with_bound, 1)) if groups.rank == 0 else ("", 0.0)
    gather_ints(groups, 0)
    return answer


def test_a_hanging_peer_is_given_up_after_the_timeout(
    workers: Callable[[int], WorkerPool],
) -> None:
    message, seconds = workers(2).run(wait_for_a_hanging_peer)[0]
    assert "collective 'gather of a number' failed" in message
    assert 0.9 < seconds < 10


def meet_nobody(groups: Groups) -> list[tuple[str, float]]:
    """A group of two in which one never starts; the bound is 2 s."""
    groups.close()
    parallel = dataclasses.replace(engine_config(ranks=2).parallel, distributed_timeout_s=2.0)
    without_store = LaunchEnvironment(1, 2, 1, 2, "127.0.0.1", 1, "moed")
    without_others = LaunchEnvironment(0, 2, 0, 2, "127.0.0.1", 0, "moed")
    return [
        timed(lambda: open_store(without_store, None, parallel.distributed_timeout_s)),
        timed(lambda: init_groups(without_others, parallel, HashStore(), None)),
    ]


def test_ranks_that_never_come_are_given_up(pool_of: Callable[[int], WorkerPool]) -> None:
    (answers,) = pool_of(1).run(meet_nobody)
    assert "the first node did not answer at 127.0.0.1 port 1 for 2 s" in answers[0][0]
    assert "collective 'rendezvous' failed" in answers[1][0]
    assert all(seconds < 20 for _, seconds in answers)


def meet_after_a_failure(groups: Groups, path: str) -> int:
    """Rank 0 has waited in vain for a rank 1 that another process takes the place of."""
    groups.close()
    parallel = dataclasses.replace(engine_config(ranks=2).parallel, distributed_timeout_s=4.0)
    place = LaunchEnvironment(groups.rank, 2, groups.rank, 2, "127.0.0.1", 0, "moed")
    if groups.rank == 0:
        message, _ = timed(lambda: init_groups(place, parallel, HashStore(), None))
        assert "collective 'rendezvous' failed" in message
    again = init_groups(place, parallel, FileStore(path, 2), None)
    (found,) = {sum(gather_ints(again, 1 + groups.rank))}
    again.close()
    return found


def test_a_rank_that_met_nobody_meets_others_later(
    pool_of: Callable[[int], WorkerPool], tmp_path: pathlib.Path
) -> None:
    assert pool_of(2).run(meet_after_a_failure, str(tmp_path / "store")) == [3, 3]


def describe(groups: Groups) -> tuple[Any, ...]:
    on_loopback = os.environ.get("GLOO_SOCKET_IFNAME")
    same = groups.cpu is groups.device is groups.agreement
    return groups.rank, groups.world_size, groups.local_rank, groups.device_type, same, on_loopback


def test_on_cpus_all_groups_are_one_gloo_group_on_loopback(
    workers: Callable[[int], WorkerPool],
) -> None:
    assert workers(2).run(describe) == [
        (0, 2, 0, "cpu", True, "lo"),
        (1, 2, 1, "cpu", True, "lo"),
    ]


@pytest.mark.parametrize(
    "error", [RuntimeError("Connection closed\nmuch more"), dist.DistNetworkError("reset")]
)
def test_errors_of_collectives_are_named(error: Exception) -> None:
    with pytest.raises(PeerLost) as caught, collective_errors("dispatch"):
        raise error
    assert "the collective 'dispatch' failed" in str(caught.value)
    assert "much more" not in str(caught.value)
    assert caught.value.__cause__ is error and caught.value.exit_code == 69


def test_our_own_faults_keep_their_names() -> None:
    for error in (ValueError("shape"), KeyError("x"), AssertionError()):
        with pytest.raises(type(error)), collective_errors("dispatch"):
            raise error


def fake_groups() -> Groups:
    group = cast(dist.ProcessGroup, None)
    return Groups(ALONE, "cpu", group, group, group, None, 1, 1.0)


def test_close_gives_up_on_a_library_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, calls = threading.Event(), []

    def hang() -> None:
        calls.append(1)
        release.wait(30)

    monkeypatch.setattr(groups_module, "CLOSE_S", 0.2)
    monkeypatch.setattr(dist, "destroy_process_group", hang)
    groups = fake_groups()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        groups.close()
        groups.close()
    assert time.monotonic() - started < 5
    assert "did not close within 0.2 s" in caplog.text
    release.set()
    assert calls == [1]


def test_close_reports_what_the_library_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with caplog.at_level(logging.WARNING):
        fake_groups().close()
    assert "did not close cleanly: Connection reset by peer" in caplog.text
