"""A piece of work that is recorded once and then replayed: a CUDA graph, or on a CPU the call."""

from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], torch.Tensor]


class Recorded(Protocol):
    """What was recorded; `replay` does it again with what its inputs' memory holds by then."""

    def replay(self) -> torch.Tensor:
        """The output, in memory that the next replay of any graph may overwrite."""
        ...


class Recorder(Protocol):
    """Makes graphs that are replayed one at a time."""

    def record(self, call: Call) -> Recorded:
        """`call` reads and writes the same memory each time, and never waits for the device.

        It is called twice, on all ranks alike: once for real, so that what happens on a first use
        only (kernels that are compiled, communicators that connect) is over, and once recorded.
        """
        ...


def recorder_for(device: torch.device) -> Recorder:
    """The one that there is on `device`."""
    return CudaRecorder(device) if device.type == "cuda" else CallRecorder()


class CudaRecorder:
    """CUDA graphs, which share one pool of memory: record the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Call) -> "CudaGraph":
        """See `Recorder.record`."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": NCCL's watchdog, a thread, asks CUDA about events at any moment.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = call()
        return CudaGraph(graph, output)


class CudaGraph:
    """One recorded graph."""

    def __init__(self, graph: "torch.cuda.CUDAGraph", output: torch.Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> torch.Tensor:
        """See `Recorded.replay`."""
        self._graph.replay()
        return self._output


class CallRecorder:
    """On a CPU, where nothing is recorded: a replay is the same call on the same memory, so that
    all around it runs as it does on a GPU.
    """

    def record(self, call: Call) -> "RecordedCall":
        """See `Recorder.record`."""
        call()
        call()
        return RecordedCall(call)


class RecordedCall:
    """One call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def replay(self) -> torch.Tensor:
        """See `Recorded.replay`."""
        return self._call()
