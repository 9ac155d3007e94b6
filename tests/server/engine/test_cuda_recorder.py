"""What a recording calls of torch.cuda, in which order; a fake driver notes it."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moed.server.graphs import CallRecorder, CudaRecorder, recorder_for

CUDA = torch.device("cuda", 0)
# What torch itself takes, before anything is replaced.
GRAPH = inspect.signature(torch.cuda.graph.__init__)
MODES = ("global", "thread_local", "relaxed")


class FakeDriver:
    """Streams and graphs that do nothing but remember the calls made on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream = "model"
        for name in ("Stream", "current_stream", "synchronize", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    def Stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, "recording")

    def current_stream(self) -> "FakeStream":
        return FakeStream(self, "model")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def CUDAGraph(self) -> "FakeGraph":
        return FakeGraph(self)

    @contextlib.contextmanager
    def _on(self, stream: "FakeStream") -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    @contextlib.contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        given = GRAPH.bind(None, *args, **kwargs).arguments
        assert given["pool"] == "pool" and given["capture_error_mode"] in MODES
        assert given["stream"].name == "recording"
        self.calls.append(f"begin {given['capture_error_mode']}")
        with self._on(given["stream"]):
            yield
        self.calls.append("end")

    def work(self) -> torch.Tensor:
        self.calls.append(f"work on {self.stream}")
        return torch.tensor([len(self.calls)])


class FakeStream:
    def __init__(self, driver: FakeDriver, name: str) -> None:
        self._driver, self.name = driver, name

    def wait_stream(self, other: "FakeStream") -> None:
        self._driver.calls.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def replay(self) -> None:
        self._driver.calls.append("replay")


def test_work_is_done_once_for_real_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    recorded = CudaRecorder(CUDA).record(driver.work)
    assert driver.calls == [
        "recording waits for model",
        "work on recording",
        "model waits for recording",
        "synchronize",
        "begin thread_local",
        "work on recording",
        "end",
    ]
    driver.calls.clear()
    # A replay launches the graph, and nothing of Python's.
    first, second = recorded.replay(), recorded.replay()
    assert driver.calls == ["replay", "replay"] and first is second


def test_the_recorder_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    assert isinstance(recorder_for(CUDA), CudaRecorder)
    assert isinstance(recorder_for(torch.device("cpu")), CallRecorder)


def test_a_call_is_made_as_often_as_a_graph_would_make_it() -> None:
    calls: list[int] = []

    def work() -> torch.Tensor:
        calls.append(1)
        return torch.tensor([len(calls)])

    recorded = CallRecorder().record(work)
    assert len(calls) == 2
    assert recorded.replay().item() == 3
