"""`torchrun … -m moed.server serve`: torchrun is the launcher, and starts one process per rank.

Each process is a rank; that of rank 0 also starts the front end and watches it from a thread.
torchrun itself ends all ranks when one fails, and starts them again as often as `--max-restarts`
says: then the front end stays, holds the open requests, and is adopted by the next rank 0. To stop,
torchrun sends SIGTERM to all ranks.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, PeerLost
from moed.config.settings import ServeSettings
from moed.dist.launch import LaunchEnvironment
from moed.dist.torchrun_workers import a_worker_has_ended
from moed.server.endings import FLUSH_S
from moed.server.frontend_process import log_progress
from moed.server.http_socket import bind_http, url_of
from moed.server.lifecycle import die_after_parent, leave
from moed.server.logs import setup_logging
from moed.server.messages import (
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    LastLaunch,
    RankLost,
    StopAsked,
    StopNow,
    ToFrontend,
    Wired,
)
from moed.server.node_of_rank import EPOCH
from moed.server.processes import spawn
from moed.server.succession import Heirs, Succession, find_predecessor, is_possible
from moed.server.torchrun_rank import STOPPED_BY_SIGTERM, RankPlace, serve_place
from moed.server.wiring import open_wire

logger = logging.getLogger(__name__)

TORCHRUN_DECIDES = ("nnodes", "node_rank", "master_addr", "master_port")
EXIT_FRONTEND_DIED = 70
# For error events, once rank 0 is gone.
LAST_WORDS_S = 10.0
# Until a front end says where it is, or one that leaves is gone.
WIRED_S = 30.0

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
    may_restart = config.recovers and environment.num_restarts_left > 0 and is_possible()
    with find_frontend(config, environment, may_restart) as frontend:
        wired = frontend.await_wired()
        refuse_other_settings(config, wired)
        frontend.start()
        told = {**wired.told, EPOCH: str(wired.epoch)}
        exit_code = serve_place(config, environment, RankPlace(config, environment, told))
        if exit_code and may_restart:
            logger.warning("torchrun starts all ranks again: the front end waits for them")
            frontend.let_go()
        elif exit_code:
            frontend.tell(RankLost(rank=0, error="the group of ranks failed; see the log"))
            frontend.drained.wait(FLUSH_S)
        frontend.stop()
    return exit_code


def refuse_other_settings(config: EngineConfig, wired: Wired) -> None:
    """Raises `ConfigError` where the front end of earlier ranks has others."""
    own = config.agreement_items()
    for name in sorted({*own, *wired.items}):
        before, now = wired.items.get(name, "(missing)"), own.get(name, "(missing)")
        if before != now:
            raise ConfigError(
                f"{name} is {now}, and was {before} before torchrun started the ranks again: "
                "restore it, or stop torchrun and start it anew"
            )


def start_lasting_frontend(
    config: EngineConfig,
    http_socket: socket.socket,
    agent_pid: int,
    may_restart: bool,
    pipe: Connection,
) -> None:
    """Target of the front end's process: it outlives rank 0, and tells its clients so."""
    # torchrun's SIGKILL for a worker is for all of the worker's session.
    os.setsid()
    if not may_restart:
        die_after_parent(LAST_WORDS_S)
    try:
        with open_wire(config) as wiring:
            url = url_of(http_socket, config.server)
            items = dict(config.agreement_items())
            wired = Wired(told=dict(wiring.told), epoch=0, url=url, items=items)
            pipe.send_bytes(msgspec.msgpack.encode(wired))
            from moed.server.frontend import run_frontend

            heirs = Heirs(Succession(agent_pid), wired) if may_restart else None
            run_frontend(config, http_socket, wiring.place(0, 0), pipe, heirs)
    except ConfigError as error:
        last_words = FrontendFailure(error=str(error), exit_code=error.exit_code)
        pipe.send_bytes(msgspec.msgpack.encode(last_words))


def find_frontend(
    config: EngineConfig, environment: LaunchEnvironment, may_restart: bool
) -> "FrontendLink":
    """That of the ranks before, if they have left one, else a new one. Raises `ConfigError`."""
    agent_pid = os.getppid()
    predecessor = find_predecessor(agent_pid)
    if predecessor is not None:
        link = FrontendLink(config, environment, *predecessor)
        if link.is_there():
            logger.info("adopted http: process %d", link.pid)
            if not may_restart:
                link.tell(LastLaunch())
            return link
    server, context = config.server, multiprocessing.get_context("spawn")
    with bind_http(server.host, server.port, "--port") as http_socket:
        pipe, far_end = context.Pipe()
        arguments = (config, http_socket, agent_pid, may_restart, far_end)
        process = spawn(context, "moed-http", start_lasting_frontend, arguments)
    far_end.close()
    assert process.pid is not None
    return FrontendLink(config, environment, pipe, process.pid)


class FrontendLink:
    """The front end, watched from a thread while the main thread runs rank 0. Use as a context."""

    def __init__(
        self, config: EngineConfig, environment: LaunchEnvironment, pipe: Connection, pid: int
    ) -> None:
        self._config = config
        self._num_workers = environment.local_world_size
        self._pipe = pipe
        self.pid = pid
        self._wired: Wired | None = None
        self._signal_reader, self._signal_writer = multiprocessing.Pipe(duplex=False)
        self._num_signals = 0
        self._is_leaving = False
        self._has_ended = threading.Event()
        self.drained = threading.Event()

    def __enter__(self) -> "FrontendLink":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def is_there(self) -> bool:
        """Whether it can be adopted: one that leaves is waited for, within a bound."""
        try:
            self._receive_wired()
        except (EOFError, OSError):
            return False
        return True

    def await_wired(self) -> Wired:
        """Where the ranks find it. Raises `ConfigError` for a network that is not there."""
        try:
            if self._wired is None:
                self._receive_wired()
            assert self._wired is not None
            return self._wired
        except (EOFError, OSError):
            raise PeerLost("the HTTP front end ended as it started") from None

    def _receive_wired(self) -> None:
        if not self._pipe.poll(WIRED_S):
            raise PeerLost(f"the HTTP front end, process {self.pid}, does not answer")
        message = _from_frontend.decode(self._pipe.recv_bytes())
        if isinstance(message, FrontendFailure):
            raise ConfigError(message.error)
        assert isinstance(message, Wired)
        self._wired = message

    def start(self) -> None:
        """Watch it, and take signals, from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self._signal_writer.send_bytes(b"!")

    def tell(self, message: ToFrontend) -> None:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except (OSError, ValueError):
            logger.warning("the HTTP front end is gone")

    def _watch(self) -> None:
        try:
            while True:
                if self._signal_reader in wait([self._pipe, self._signal_reader]):
                    self._signal_reader.recv_bytes()
                    self._stop_all()
                while self._pipe.poll():
                    self._take(_from_frontend.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._has_ended.set()
        if not self._is_leaving:
            logger.error("the HTTP front end ended")
            leave(EXIT_FRONTEND_DIED)

    def _stop_all(self) -> None:
        """Somebody wants this node to stop, or torchrun only ends its ranks."""
        if a_worker_has_ended(self._num_workers):
            logger.info("another rank of this node has ended: torchrun ends this one")
            leave(STOPPED_BY_SIGTERM)
        self.tell(Drain() if self._num_signals == 1 else StopNow())

    def _take(self, message: FromFrontend) -> None:
        assert self._wired is not None
        log_progress(self._config, self._wired.url, message)
        if isinstance(message, Drained):
            self.drained.set()
        elif isinstance(message, StopAsked):
            self._num_signals += 1
            self.tell(Drain())
        elif isinstance(message, FrontendFailure):
            logger.error("the HTTP front end failed: %s", message.error)

    def let_go(self) -> None:
        """Leave it to the ranks that come next."""
        self._is_leaving = True
        self._pipe.close()

    def stop(self) -> None:
        """End it, within a bound, unless it was let go. Safe to call twice."""
        if self._pipe.closed:
            return
        self._is_leaving = True
        self.tell(StopNow())
        if not self._has_ended.wait(FLUSH_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
