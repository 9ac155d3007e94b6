"""Real rank processes without an HTTP front end: the test takes its place on the channel."""

import multiprocessing
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType

import msgspec
import zmq

from moed.config.engine_config import EngineConfig
from moed.dist.launch import LaunchEnvironment
from moed.server.messages import (
    AbortRequests,
    AddRequest,
    ExpertLoad,
    FromEngine,
    FromRank,
    RankFailure,
    RankReady,
    RankStats,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenOutput,
    Wake,
)
from moed.server.rank import run_rank

START_S = 90.0
STEP_S = 60.0

_decoder = msgspec.msgpack.Decoder(FromEngine)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class RankGroup:
    """Use as a context; every wait is bounded and every process is ended, by its own handle."""

    def __init__(self, config: EngineConfig) -> None:
        self.num_ranks = config.parallel.data_parallel_size
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.stats: dict[int, RankStats] = {}
        self.expert_loads: dict[int, ExpertLoad] = {}
        self.ready: dict[int, RankReady] = {}
        self.processes: list[SpawnProcess] = []
        self._failures: list[Connection] = []
        self._wake_number = 0
        self._zmq = zmq.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as store_socket:
            for rank in range(self.num_ranks):
                environment = LaunchEnvironment(
                    rank=rank,
                    world_size=self.num_ranks,
                    local_rank=rank,
                    local_world_size=self.num_ranks,
                    store_host="127.0.0.1",
                    store_port=store_socket.getsockname()[1],
                    launcher="moed",
                )
                words, far_words = spawn.Pipe()
                own_socket = store_socket if rank == 0 else None
                told = {"address": f"tcp://127.0.0.1:{port}"}
                arguments = (config, environment, own_socket, told, far_words, None)
                process = spawn.Process(target=run_rank, args=arguments)
                process.start()
                far_words.close()
                self.processes.append(process)
                self._failures.append(words)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while len(self.ready) < self.num_ranks:
            assert time.monotonic() < deadline, "the ranks did not become ready"
            assert all(process.is_alive() for process in self.processes), self.failures()
            self._read(0.2)

    def add(self, rank: int, message: AddRequest) -> None:
        """Give a request to a rank; it starts with the next `wake`."""
        self.outputs[message.request_id] = []
        self._send(rank, message)

    def abort(self, rank: int, request_ids: Sequence[str]) -> None:
        self._send(rank, AbortRequests(list(request_ids)))

    def wake(self) -> None:
        self._wake_number += 1
        for rank in range(self.num_ranks):
            self._send(rank, Wake(self._wake_number))

    def finish(self, request_ids: Sequence[str]) -> None:
        """Wait until all of these have ended."""
        deadline = time.monotonic() + STEP_S
        while not all(self.reason(request_id) for request_id in request_ids):
            assert time.monotonic() < deadline, "requests did not end"
            assert all(process.is_alive() for process in self.processes), self.failures()
            self._read(0.2)

    def settle(self) -> None:
        """Wait until every rank has reported that it is at rest, after the same number of steps."""
        deadline = time.monotonic() + STEP_S
        while not self._is_settled():
            assert time.monotonic() < deadline, self.stats
            self._read(0.2)

    def wait_expert_loads(self) -> None:
        """Wait until every rank has reported rows that its experts computed: it does so at most
        once a second, and when it goes to sleep, which may be after its last outputs are here.
        """
        deadline = time.monotonic() + STEP_S
        while not all(self._has_rows(rank) for rank in range(self.num_ranks)):
            assert time.monotonic() < deadline, self.expert_loads
            self._read(0.2)

    def _has_rows(self, rank: int) -> bool:
        load = self.expert_loads.get(rank)
        return load is not None and sum(map(sum, load.rows["prefill"])) > 0

    def _is_settled(self) -> bool:
        num_steps = {stats.num_steps for stats in self.stats.values()}
        at_rest = all(map(_is_at_rest, self.stats.values()))
        return len(self.stats) == self.num_ranks and at_rest and len(num_steps) == 1

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request, after checking that their indexes follow each other."""
        tokens: list[int] = []
        for output in self.outputs[request_id]:
            assert output.output_index == len(tokens), output
            tokens.extend(output.token_ids)
        return tokens

    def reason(self, request_id: str) -> str | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def stop(self) -> list[int | None]:
        """Stop all together; returns their exit codes."""
        for rank in range(self.num_ranks):
            self._send(rank, Shutdown())
        self.wake()
        return self.exit_codes()

    def exit_codes(self, timeout_s: float = START_S) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def failures(self) -> dict[int, RankFailure]:
        """The last words of ranks that have left some."""
        found = {}
        for rank, words in enumerate(self._failures):
            try:
                while words.poll(1.0):
                    message = _from_rank.decode(words.recv_bytes())
                    if isinstance(message, RankFailure):
                        found[rank] = message
            except EOFError:
                continue
        return found

    def _send(self, rank: int, message: ToEngine) -> None:
        self._socket.send_multipart([b"rank-%d-0" % rank, msgspec.msgpack.encode(message)])

    def _read(self, timeout_s: float) -> None:
        while self._socket.poll(int(timeout_s * 1000)):
            message = _decoder.decode(self._socket.recv_multipart()[1])
            if isinstance(message, RankReady):
                self.ready[message.rank] = message
            elif isinstance(message, ExpertLoad):
                self.expert_loads[message.rank] = message
            elif isinstance(message, StepOutputs):
                self.stats[message.rank] = message.stats
                for output in message.outputs:
                    self.outputs[output.request_id].append(output)
            timeout_s = 0.0

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
            process.close()
        for words in self._failures:
            words.close()
        self._socket.close()
        self._zmq.term()


def _is_at_rest(stats: RankStats) -> bool:
    return (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used) == (0, 0, 0)
