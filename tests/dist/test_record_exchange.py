"""Records over NCCL: what is called of torch.cuda, in which order, with a real collective below."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moed.dist import record_exchange
from moed.dist.agreement import Agreement, DecisionKind, RankState
from moed.dist.groups import Groups
from moed.dist.record_exchange import DeviceExchange
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool


class FakeStreams:
    """torch.cuda's streams and events on a CPU, where all work is done at once."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        fakes = {
            "Stream": lambda device: self.named("agreement"),
            "current_stream": lambda: self.named("model"),
            "stream": self._inside,
            "Event": lambda: self.named("event"),
        }
        with contextlib.ExitStack() as stack:
            for name, fake in fakes.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, fake))
            unpinned = mock.patch.object(
                record_exchange, "pinned_zeros", lambda shape: torch.zeros(shape, dtype=torch.int64)
            )
            stack.enter_context(unpinned)
            original = dist.all_to_all_single
            note = mock.patch.object(dist, "all_to_all_single", self._noted(original))
            stack.enter_context(note)
            yield

    def named(self, name: str) -> mock.Mock:
        made = mock.Mock()
        made.name = name
        made.wait_stream = lambda other: self.calls.append(f"{name} waits for {other.name}")
        made.record = lambda: self.calls.append("event recorded")
        made.synchronize = lambda: self.calls.append("host waits for event")
        return made

    @contextlib.contextmanager
    def _inside(self, stream: mock.Mock) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append("all_to_all_single")
            return original(*args, **kwargs)

        return call


def agree_on_a_gpu(groups: Groups) -> tuple[list[list[int]], list[str]]:
    """Two steps, each rank with other numbers; the sizes seen, and the calls of the second."""
    streams = FakeStreams()
    with streams.active():
        exchange = DeviceExchange(groups, 2, torch.device("cpu"))
        exchange.exchange([9, 9])
        streams.calls.clear()
        rows = exchange.exchange([groups.rank, 40 + groups.rank])
    return rows, streams.calls


def test_records_travel_on_a_stream_of_their_own(workers: Callable[[int], WorkerPool]) -> None:
    for rows, calls in workers(2).run(agree_on_a_gpu):
        assert rows == [[0, 40], [1, 41]]
        assert calls == [
            "agreement waits for model",
            "on agreement",
            "all_to_all_single",
            "event recorded",
            "off agreement",
            "host waits for event",
        ]


def agree_by(groups: Groups, backend: str) -> list[Any]:
    parallel = dataclasses.replace(engine_config(ranks=2).parallel, agreement_backend=backend)
    streams = FakeStreams()
    with streams.active():
        agreement = Agreement(groups, parallel, 7)
        streams.calls.clear()
        agreed = agreement.agree(1, 3 * groups.rank, RankState.WORKING, 0)
    used_own_stream = "on agreement" in streams.calls
    return [agreed.decision.kind, agreed.dp_metadata.local_sizes, used_own_stream]


def test_both_backends_agree_on_the_same(workers: Callable[[int], WorkerPool]) -> None:
    assert workers(2).run(agree_by, "nccl") == [[DecisionKind.RUN, [0, 3], True]] * 2
    assert workers(2).run(agree_by, "gloo") == [[DecisionKind.RUN, [0, 3], False]] * 2
