"""Every process that exists, who starts it, how it reports ready, and how all of them end.

    moed serve ─ launcher (this process: no torch, no HTTP)
                  ├─ front end (HTTP, on a socket that the launcher has bound)
                  └─ rank 0 … rank N-1

Start, watch, stop are three calls in a row. A process that ends on its own takes the others with
it: open requests get an error event, the failing rank's own error is reported last, and the exit
code tells the kind of fault.
"""

import contextlib
import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

import msgspec

from moed.config.engine_config import EngineConfig
from moed.server.http_socket import bind_http, url_of
from moed.server.lifecycle import describe_exit, die_with_parent
from moed.server.messages import (
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    GroupReady,
    RankFailure,
    RankLost,
    Serving,
    StopAsked,
    StopNow,
    ToFrontend,
)
from moed.server.rank import run_rank
from moed.server.wire import Wire
from moed.server.wiring import Wiring, bind_store, local_environments, open_wire

logger = logging.getLogger(__name__)

# After a rank's failure the others fail too, within moments, in their collectives; waiting for
# their words lets the report name the cause and not a consequence.
FAILURE_GATHERING_S = 1.0
# What the front end gets to send error events, and processes to leave by themselves, before
# SIGKILL.
FLUSH_S = 3.0
LEAVE_S = 5.0
# Beyond the front end's own drain timeout: it answers at the timeout, not after it.
DRAIN_SLACK_S = 2.0

READY = """ready: %s on %d rank(s), backend %s, at most %d tokens per request

  Try it:  curl %s/chat/completions -H 'Content-Type: application/json' \\
             -d '{"messages": [{"role": "user", "content": "12 + 30"}]}'
  Python:  openai.OpenAI(base_url="%s", api_key="none")
  Stop:    Ctrl-C lets open requests finish; a second one stops at once
"""

EXIT_RANK_DIED = 70

_from_frontend = msgspec.msgpack.Decoder(FromFrontend)
_failure = msgspec.msgpack.Decoder(RankFailure)


def serve(config: EngineConfig) -> int:
    """Serve until told to stop or until a process fails; returns the exit code of `moed serve`.

    Raises `ConfigError` when the HTTP port cannot be bound.
    """
    server = config.server
    http_socket = bind_http(server.host, server.port, "--port")
    with (
        http_socket,
        bind_store(config) as store_socket,
        open_wire(config) as wiring,
        Supervisor(config, http_socket, store_socket, wiring) as group,
    ):
        group.start()
        exit_code = group.watch()
        group.stop()
    return exit_code


def start_frontend(
    config: EngineConfig,
    http_socket: socket.socket,
    wire: Wire,
    wire_socket: socket.socket | None,
    launcher_pipe: Connection,
) -> None:
    """Target of the front end's process: its heavy imports stay out of the launcher."""
    die_with_parent()
    from moed.server.frontend import run_frontend

    run_frontend(config, http_socket, wire, wire_socket, launcher_pipe)


def log_progress(config: EngineConfig, http_socket: socket.socket, message: FromFrontend) -> None:
    """Say in the log what the front end has reported."""
    url = url_of(http_socket, config.server)
    if isinstance(message, Serving):
        logger.info("listening on %s, loading the model", url)
    elif isinstance(message, GroupReady):
        logger.info(
            READY,
            config.model.served_model_names[0],
            config.parallel.world_size,
            config.parallel.backend.name,
            message.max_model_len,
            f"{url}/v1",
            f"{url}/v1",
        )


@dataclass
class Rank:
    """One rank's process and the pipe of its last words."""

    rank: int
    process: SpawnProcess
    failures: Connection
    failure: RankFailure | None = None

    def collect(self) -> None:
        """Keep the rank's last words, if it has left any."""
        try:
            while self.failure is None and self.failures.poll():
                self.failure = _failure.decode(self.failures.recv_bytes())
        except (EOFError, OSError):
            pass

    def report(self) -> str:
        """What went wrong, for a person."""
        if self.failure is None:
            return f"rank {self.rank} ended without a word: {describe_exit(self.process.exitcode)}"
        return f"rank {self.rank} failed: {self.failure.error}"

    @property
    def is_consequence(self) -> bool:
        return self.failure is not None and self.failure.is_consequence


def report_end(ranks: Sequence[Rank], first: Rank) -> int:
    """Log what the ranks that have ended left as their words; `first` was seen first. Returns the
    exit code of the cause.
    """
    ended = [rank for rank in ranks if not rank.process.is_alive()]
    for rank in ended:
        rank.collect()
    # Consequences first, causes last: the last lines of the log are what a person reads.
    ended.sort(key=lambda rank: (not rank.is_consequence, rank is first))
    for rank in ended:
        if rank.failure is not None and rank.failure.details:
            logger.error("%s", rank.failure.details.rstrip())
        logger.error("%s", rank.report())
    cause = ended[-1]
    return cause.failure.exit_code if cause.failure is not None else EXIT_RANK_DIED


class Supervisor:
    """Holds all processes of one launch. Use as a context: leaving it ends whatever still runs."""

    def __init__(
        self,
        config: EngineConfig,
        http_socket: socket.socket,
        store_socket: socket.socket,
        wiring: Wiring,
    ) -> None:
        self._config = config
        self._http_socket = http_socket
        # Bound here and handed over open: between choosing a port and using it nobody can take it.
        self._store_socket = store_socket
        self._wiring = wiring
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[Rank] = []
        self._frontend: SpawnProcess | None = None
        self._frontend_pipe: Connection | None = None
        self._frontend_failure: FrontendFailure | None = None
        self._signals: list[int] = []
        self._group_is_ready = False
        # Signals only write a byte here, so that `wait` wakes up; the watch loop decides.
        self._signal_reader, self._signal_writer = self._context.Pipe(duplex=False)

    def __enter__(self) -> "Supervisor":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all(0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._signal_writer.send_bytes(b"!")

    # Start ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the front end and one process per rank; returns at once."""
        self._frontend_pipe, far_end = self._context.Pipe()
        self._frontend = self._spawn(
            "moed-http",
            start_frontend,
            (
                self._config,
                self._http_socket,
                self._wiring.wire,
                self._wiring.listener,
                far_end,
            ),
        )
        far_end.close()
        for environment in local_environments(self._config, self._store_socket.getsockname()[1]):
            words, far_words = self._context.Pipe(duplex=False)
            rank = environment.rank
            own_socket = self._store_socket if rank == 0 else None
            arguments = (self._config, environment, own_socket, self._wiring.told)
            process = self._spawn(f"moed-rank-{rank}", run_rank, (*arguments, far_words))
            far_words.close()
            self._ranks.append(Rank(rank, process, words))

    def _spawn(self, name: str, target: object, arguments: tuple[object, ...]) -> SpawnProcess:
        process = self._context.Process(name=name, target=target, args=arguments)  # type: ignore[arg-type]
        process.start()
        logger.info("started %s: process %d", name.removeprefix("moed-"), process.pid)
        return process

    # Watch ---------------------------------------------------------------------------------------

    def watch(self) -> int:
        """Wait for a signal or for the end of a process, and act on it; returns the exit code."""
        while True:
            if self._signals:
                return self._drain()
            ended = [rank for rank in self._ranks if not rank.process.is_alive()]
            if ended:
                return self._on_rank_end()
            if self._frontend is not None and not self._frontend.is_alive():
                return self._on_frontend_end()
            self._wait_for_news(None)

    def _on_frontend_end(self) -> int:
        assert self._frontend is not None and self._frontend_pipe is not None
        if not self._frontend_pipe.closed:
            self._read_frontend()
        failure = self._frontend_failure
        if failure is None:
            logger.error("the HTTP front end ended: %s", describe_exit(self._frontend.exitcode))
            return EXIT_RANK_DIED
        # First the ranks, so that the reason is the last line of the log.
        self._end_all(0.0)
        logger.error("the HTTP front end failed: %s", failure.error)
        return failure.exit_code

    def _wait_for_news(self, timeout_s: float | None) -> list[object]:
        """Block until a signal, a message of the front end, or the end of a process."""
        assert self._frontend is not None and self._frontend_pipe is not None
        sources: list[object] = [self._signal_reader, self._frontend.sentinel]
        sources += [rank.process.sentinel for rank in self._ranks]
        if not self._frontend_pipe.closed:
            sources.append(self._frontend_pipe)
        ready = wait(sources, timeout_s)  # type: ignore[arg-type]
        if self._signal_reader in ready:
            self._signal_reader.recv_bytes()
        if self._frontend_pipe in ready:
            return self._read_frontend()
        return []

    def _read_frontend(self) -> list[object]:
        assert self._frontend_pipe is not None
        messages: list[object] = []
        try:
            while self._frontend_pipe.poll():
                message = _from_frontend.decode(self._frontend_pipe.recv_bytes())
                messages.append(message)
                self._group_is_ready |= isinstance(message, GroupReady)
                if isinstance(message, FrontendFailure):
                    self._frontend_failure = message
                if isinstance(message, StopAsked):
                    self._signals.append(signal.SIGTERM)
                log_progress(self._config, self._http_socket, message)
        except (EOFError, OSError):
            self._frontend_pipe.close()
        return messages

    # Stop ----------------------------------------------------------------------------------------

    def _tell_frontend(self, message: ToFrontend) -> None:
        assert self._frontend_pipe is not None
        try:
            self._frontend_pipe.send_bytes(msgspec.msgpack.encode(message))
        except (OSError, ValueError):
            logger.warning("the HTTP front end is gone and could not be told to stop")

    def _drain(self) -> int:
        """After a signal: let open requests finish; a second signal, or a rank's end, cuts it
        short.
        """
        if not self._group_is_ready:
            logger.info("stopping before the ranks are ready: no request is open")
            return 0
        timeout_s = self._config.server.shutdown_timeout_s
        logger.info("stopping: open requests get up to %g s; signal again to stop now", timeout_s)
        self._tell_frontend(Drain())
        deadline = time.monotonic() + timeout_s + DRAIN_SLACK_S
        while (remaining := deadline - time.monotonic()) > 0:
            if len(self._signals) > 1:
                logger.warning("second signal: stopping now")
                self._tell_frontend(StopNow())
                return 128 + self._signals[-1]
            for message in self._wait_for_news(remaining):
                if isinstance(message, Drained):
                    if message.num_unfinished:
                        logger.warning("%d request(s) did not finish", message.num_unfinished)
                    return 0
            if self._frontend is None or not self._frontend.is_alive():
                return EXIT_RANK_DIED
            if any(self._is_failed(rank) for rank in self._ranks):
                return self._on_rank_end()
        logger.warning("the HTTP front end did not drain in time")
        return 0

    @staticmethod
    def _is_failed(rank: Rank) -> bool:
        return not rank.process.is_alive() and rank.process.exitcode != 0

    def _on_rank_end(self) -> int:
        """A rank has ended: tell the clients, collect everybody's words, report the cause last."""
        first = next(rank for rank in self._ranks if not rank.process.is_alive())
        first.collect()
        self._tell_frontend(RankLost(rank=first.rank, error=first.report()))
        deadline = time.monotonic() + FAILURE_GATHERING_S
        while any(rank.process.is_alive() for rank in self._ranks):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait([r.process.sentinel for r in self._ranks], remaining):
                break
            # `wait` returns at once for those that have ended already.
            time.sleep(0.02)
        self._await_drained(FLUSH_S)
        return report_end(self._ranks, first)

    def _await_drained(self, timeout_s: float) -> None:
        """Wait until the front end has told its clients, or is gone."""
        assert self._frontend is not None and self._frontend_pipe is not None
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0 and self._frontend.is_alive():
            if not wait([self._frontend_pipe, self._frontend.sentinel], remaining):
                return
            if any(isinstance(message, Drained) for message in self._read_frontend()):
                return
            if self._frontend_pipe.closed:
                return

    def stop(self) -> None:
        """End all processes: those about to leave may, within a bound. Safe to call twice."""
        # Ranks that are still loading would not hear of it; they hold nothing worth waiting for.
        self._end_all(LEAVE_S if self._group_is_ready else 0.0)

    def _end_all(self, patience_s: float) -> None:
        processes = [rank.process for rank in self._ranks]
        if self._frontend is not None:
            processes.append(self._frontend)
            self._tell_frontend_quietly()
        deadline = time.monotonic() + patience_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()

    def _tell_frontend_quietly(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._frontend_pipe is not None:
                self._frontend_pipe.send_bytes(msgspec.msgpack.encode(StopNow()))
