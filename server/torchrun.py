"""`torchrun … -m moed.server serve`: torchrun is the launcher, and starts one process per rank.

Each process is a rank; that of rank 0 also starts the front end and watches it from a thread.
torchrun itself ends all ranks when one fails, and sends SIGTERM to all of them to stop.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.dist.launch import LaunchEnvironment
from moed.server.launcher import (
    FLUSH_S,
    bind_http,
    log_progress,
    runtime_folder,
    start_frontend,
)
from moed.server.lifecycle import FrontendPlace, describe_exit
from moed.server.logs import setup_logging
from moed.server.messages import (
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    RankLost,
    StopNow,
    ToFrontend,
)
from moed.server.rank import describe_failure, serve_rank

if TYPE_CHECKING:
    from moed.dist.groups import Groups

logger = logging.getLogger(__name__)

MAX_ADDRESS_BYTES = 256
EXIT_FRONTEND_DIED = 70

_from_frontend = msgspec.msgpack.Decoder(FromFrontend)


def serve_under_torchrun(config: EngineConfig, environment: LaunchEnvironment) -> int:
    """Be one rank of torchrun's group until it stops; returns this process's exit code."""
    if environment.world_size != environment.local_world_size:
        raise ConfigError(
            f"torchrun started {environment.world_size} ranks, {environment.local_world_size} of "
            "them on this node: several nodes are not served yet. Use --nnodes 1."
        )
    parallel = config.parallel
    if environment.world_size != parallel.world_size:
        raise ConfigError(
            f"torchrun started {environment.world_size} rank(s), and --data-parallel-size "
            f"{parallel.data_parallel_size} x --tensor-parallel-size "
            f"{parallel.tensor_parallel_size} are {parallel.world_size}: they must be equal"
        )
    server = config.server
    setup_logging(f"rank {environment.rank}", server.log_level, server.observability.log_format)
    if environment.rank == 0:
        return _serve_first_rank(config, environment)
    # Rank 0's front end drains and then stops all ranks together; a signal alone stops none.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _serve(config, environment, "")


def _serve(config: EngineConfig, environment: LaunchEnvironment, address: str) -> int:
    try:
        serve_rank(config, environment, None, lambda groups: share_address(groups, address))
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        logger.error("%srank %d failed: %s", failure.details, failure.rank, failure.error)
        return failure.exit_code
    return 0


def _serve_first_rank(config: EngineConfig, environment: LaunchEnvironment) -> int:
    with bind_http(config.server) as http_socket, runtime_folder() as folder:
        address = f"ipc://{folder}/engines"
        frontend = FrontendThread(config, http_socket, address)
        frontend.start()
        exit_code = _serve(config, environment, address)
        if exit_code:
            frontend.tell(RankLost(rank=0, error="the group of ranks failed; see the log"))
            frontend.drained.wait(FLUSH_S)
        frontend.stop()
    return exit_code


def share_address(groups: "Groups", address: str) -> str:
    """Rank 0's `address`, on every rank. Collective."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(MAX_ADDRESS_BYTES, dtype=torch.uint8)
    encoded = address.encode()
    buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=groups.cpu)
    return bytes(buffer.tolist()).rstrip(b"\0").decode()


class FrontendThread:
    """The front end's process, watched from a thread while the main thread runs rank 0."""

    def __init__(self, config: EngineConfig, http_socket: socket.socket, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        arguments = (config, http_socket, FrontendPlace(address, 0, 0), far_end)
        self._process: SpawnProcess = context.Process(
            name="moed-http", target=start_frontend, args=arguments
        )
        self._far_end: Connection | None = far_end
        self._config = config
        self._http_socket = http_socket
        self._signal_reader, self._signal_writer = context.Pipe(duplex=False)
        self._num_signals = 0
        self._stopping = False
        self.drained = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._process.start()
        logger.info("started http: process %d", self._process.pid)
        assert self._far_end is not None
        self._far_end.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._thread.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self._signal_writer.send_bytes(b"!")

    def tell(self, message: ToFrontend) -> None:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except (OSError, ValueError):
            logger.warning("the HTTP front end is gone")

    def _watch(self) -> None:
        while True:
            ready = wait([self._pipe, self._signal_reader, self._process.sentinel])
            if self._signal_reader in ready:
                self._signal_reader.recv_bytes()
                self.tell(Drain() if self._num_signals == 1 else StopNow())
            try:
                while self._pipe.poll():
                    message = _from_frontend.decode(self._pipe.recv_bytes())
                    log_progress(self._config, self._http_socket, message)
                    if isinstance(message, Drained):
                        self.drained.set()
                    elif isinstance(message, FrontendFailure):
                        logger.error("the HTTP front end failed: %s", message.error)
            except (EOFError, OSError):
                self._process.join(FLUSH_S)
            if not self._process.is_alive():
                if self._stopping:
                    return
                logger.error("the HTTP front end ended: %s", describe_exit(self._process.exitcode))
                sys.stderr.flush()
                os._exit(EXIT_FRONTEND_DIED)

    def stop(self) -> None:
        """End the front end, within a bound."""
        self._stopping = True
        self.tell(StopNow())
        self._process.join(FLUSH_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
