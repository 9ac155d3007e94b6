"""`torchrun … -m moed.server serve`: torchrun is the launcher, and starts one process per rank.

Each process is a rank; that of rank 0 also starts the front end and watches it from a thread.
torchrun itself ends all ranks when one fails, and sends SIGTERM to all of them to stop.
"""

import logging
import multiprocessing
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.config.settings import ServeSettings
from moed.dist.launch import LaunchEnvironment
from moed.server.endings import FLUSH_S
from moed.server.frontend_process import log_progress
from moed.server.http_socket import bind_http
from moed.server.lifecycle import FrontendPlace, describe_exit, die_after_parent, leave
from moed.server.logs import setup_logging
from moed.server.messages import (
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    RankLost,
    StopAsked,
    StopNow,
    ToFrontend,
)
from moed.server.torchrun_rank import RankPlace, serve_place
from moed.server.wiring import Wiring, open_wire

logger = logging.getLogger(__name__)

TORCHRUN_DECIDES = ("nnodes", "node_rank", "master_addr", "master_port")
EXIT_FRONTEND_DIED = 70
# For error events, once rank 0 is gone.
LAST_WORDS_S = 10.0

_from_frontend = msgspec.msgpack.Decoder(FromFrontend)


def settings_under_torchrun(
    settings: ServeSettings, origins: Mapping[str, str], environment: LaunchEnvironment
) -> tuple[ServeSettings, dict[str, str]]:
    """With what torchrun has decided already. Raises `ConfigError` where it was given twice."""
    given = [name for name in TORCHRUN_DECIDES if name in origins]
    if given:
        raise ConfigError(
            f"{given[0]} comes from {origins[given[0]]}, and torchrun decides it: leave it out"
        )
    num_local = environment.local_world_size
    if environment.world_size % num_local:
        raise ConfigError(
            f"torchrun started {num_local} of {environment.world_size} ranks on this node: give "
            "all nodes the same --nproc-per-node"
        )
    found: dict[str, Any] = {
        "nnodes": environment.world_size // num_local,
        "node_rank": environment.rank // num_local,
    }
    if found["nnodes"] > 1:
        found |= {"master_addr": environment.store_host, "master_port": environment.store_port}
    if "data_parallel_size" not in origins:
        size = max(1, environment.world_size // settings.tensor_parallel_size)
        found["data_parallel_size"] = size
    return replace(settings, **found), {**origins, **dict.fromkeys(found, "torchrun")}


def serve_under_torchrun(config: EngineConfig, environment: LaunchEnvironment) -> int:
    """Be one rank of torchrun's group until it stops; returns this process's exit code."""
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
    place = RankPlace(config, environment, {})
    # Rank 0's front end drains and then stops all ranks together; a signal alone stops none.
    signal.signal(signal.SIGTERM, place.on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return serve_place(config, environment, place)


def _serve_first_rank(config: EngineConfig, environment: LaunchEnvironment) -> int:
    server = config.server
    with bind_http(server.host, server.port, "--port") as http_socket, open_wire(config) as wiring:
        frontend = FrontendThread(config, http_socket, wiring)
        frontend.start()
        place = RankPlace(config, environment, wiring.told)
        exit_code = serve_place(config, environment, place)
        if exit_code:
            frontend.tell(RankLost(rank=0, error="the group of ranks failed; see the log"))
            frontend.drained.wait(FLUSH_S)
        frontend.stop()
    return exit_code


def start_lasting_frontend(
    config: EngineConfig, http_socket: socket.socket, place: FrontendPlace, pipe: Connection
) -> None:
    """Target of the front end's process: it outlives rank 0, and tells its clients so."""
    die_after_parent(LAST_WORDS_S)
    from moed.server.frontend import run_frontend

    run_frontend(config, http_socket, place, pipe)


class FrontendThread:
    """The front end's process, watched from a thread while the main thread runs rank 0."""

    def __init__(self, config: EngineConfig, http_socket: socket.socket, wiring: Wiring) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        arguments = (config, http_socket, wiring.place(0, 0), far_end)
        self._process: SpawnProcess = context.Process(
            name="moed-http", target=start_lasting_frontend, args=arguments
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
                    elif isinstance(message, StopAsked):
                        self._num_signals += 1
                        self.tell(Drain())
                    elif isinstance(message, FrontendFailure):
                        logger.error("the HTTP front end failed: %s", message.error)
            except (EOFError, OSError):
                self._process.join(FLUSH_S)
            if not self._process.is_alive():
                if self._stopping:
                    return
                logger.error("the HTTP front end ended: %s", describe_exit(self._process.exitcode))
                leave(EXIT_FRONTEND_DIED)

    def stop(self) -> None:
        """End the front end, within a bound."""
        self._stopping = True
        self.tell(StopNow())
        self._process.join(FLUSH_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
