"""Every process that exists, who starts it, how it reports ready, and how all of them end.

    moed serve ─ launcher (this process: no torch, no HTTP)
                  ├─ front end (HTTP, on a socket that the launcher has bound)
                  └─ rank 0 … rank N-1

Start, watch, stop are three calls in a row. A rank that ends on its own costs no request: the group
is formed anew (`moed.server.rank_group`) while the front end holds what is open, and a front end
that ends is replaced on the same port. Where that is not wanted, cannot help, or has happened too
often, open requests get an error event, the failing rank's own error is reported last, and the exit
code tells the kind of fault.
"""

import contextlib
import logging
import multiprocessing
import signal
import socket
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, ModelError, UsageError
from moed.server.http_socket import bind_http, url_of
from moed.server.lifecycle import FrontendPlace, describe_exit, die_with_parent
from moed.server.messages import (
    Active,
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    GroupReady,
    RankLost,
    RankSlow,
    Regrouping,
    Serving,
    StopAsked,
    StopNow,
    ToFrontend,
)
from moed.server.rank_group import RankGroup
from moed.server.rank_process import Rank
from moed.server.restarts import WINDOW_S, RestartBudget
from moed.server.watchdog import Stall, ask_for_stacks, describe
from moed.server.wiring import Wiring, bind_store, open_wire

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
# What no new process mends: settings, a checkpoint, ranks that differ.
FOR_GOOD = frozenset({UsageError.exit_code, ModelError.exit_code, ConfigError.exit_code})

_from_frontend = msgspec.msgpack.Decoder(FromFrontend)


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
        Supervisor(config, http_socket, wiring) as group,
    ):
        group.start(store_socket)
        exit_code = group.watch()
        group.stop()
    return exit_code


def start_frontend(
    config: EngineConfig,
    http_socket: socket.socket,
    place: FrontendPlace,
    launcher_pipe: Connection,
) -> None:
    """Target of the front end's process: its heavy imports stay out of the launcher."""
    die_with_parent()
    from moed.server.frontend import run_frontend

    run_frontend(config, http_socket, place, launcher_pipe)


def log_progress(config: EngineConfig, http_socket: socket.socket, message: FromFrontend) -> None:
    """Say in the log what the front end has reported."""
    url = url_of(http_socket, config.server)
    if isinstance(message, Serving):
        logger.info("listening on %s, loading the model", url)
    elif isinstance(message, GroupReady) and message.epoch:
        logger.info("ready again: all ranks serve in epoch %d", message.epoch)
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


def report_end(ended: list[Rank], first: Rank) -> int:
    """Log the last words of those that have ended; `first` was seen first. Returns the exit code of
    the cause.
    """
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

    def __init__(self, config: EngineConfig, http_socket: socket.socket, wiring: Wiring) -> None:
        self._config = config
        self._http_socket = http_socket
        self._wiring = wiring
        self._context = multiprocessing.get_context("spawn")
        self._group = RankGroup(config, self._context, self._spawn, wiring.told)
        self._budget = RestartBudget(config.server.recovery.max_restarts, time.monotonic)
        self._num_frontends = 0
        self._frontend: SpawnProcess | None = None
        self._frontend_pipe: Connection | None = None
        self._frontend_failure: FrontendFailure | None = None
        self._signals: list[int] = []
        self._has_been_ready = self._is_stalled = False
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

    def start(self, store_socket: socket.socket) -> None:
        """Start the front end and one process per rank of this node; returns at once."""
        self._start_frontend()
        self._group.start(store_socket)

    def _start_frontend(self) -> None:
        self._frontend_pipe, far_end = self._context.Pipe()
        place = self._wiring.place(self._num_frontends, self._group.epoch)
        self._num_frontends += 1
        self._frontend = self._spawn(
            "moed-http", start_frontend, (self._config, self._http_socket, place, far_end)
        )
        far_end.close()

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
            exit_code = self._look_after_ranks(self._group.ended)
            if exit_code is None and self._frontend is not None and not self._frontend.is_alive():
                exit_code = self._on_frontend_end()
            if exit_code is not None:
                return exit_code
            self._wait_for_news(self._group.time_left_s)

    @property
    def _recovers(self) -> bool:
        """Between nodes, no group is formed anew yet."""
        is_wanted = self._config.server.recovery.on_rank_failure == "recover"
        return is_wanted and self._config.nodes is None

    def _look_after_ranks(self, ended: list[Rank]) -> int | None:
        """Form the group anew where that is due. Returns the exit code where it is of no use."""
        if not ended:
            return self._look_at_progress()
        if not self._can_recover(ended):
            return self._end_with_ranks(ended)
        for rank in ended:
            if rank.failure is not None and rank.failure.details:
                logger.error("%s", rank.failure.details.rstrip())
        self._form_anew(ended, ended[0].rank, "; ".join(rank.report() for rank in ended))
        return None

    def _look_at_progress(self) -> int | None:
        """All processes are there: do they get on?"""
        reason = self._group.advance()
        stall = self._group.look()
        if stall is None and self._is_stalled:
            self._tell_frontend(RankSlow(""))
        elif stall is not None and not self._is_stalled:
            self._tell_of_stall(stall)
        self._is_stalled = stall is not None
        if stall is not None and self._group.watchdog.is_late(stall):
            if stall.rank is not None:
                rank = self._group.ranks[stall.rank]
                rank.end(describe(stall, rank.process.pid))
                return self._look_after_ranks(self._group.ended)
            reason = describe(stall, None)
        if reason is None:
            return None
        if not self._may_try_again():
            self._group.ranks[0].end(reason)
            return self._end_with_ranks(self._group.ended)
        self._form_anew([], None, reason)
        return None

    def _tell_of_stall(self, stall: Stall) -> None:
        ranks = self._group.ranks
        pids = [rank.process.pid or 0 for rank in ranks]
        pid = None if stall.rank is None else pids[stall.rank]
        text = describe(stall, pid)
        limit_s = self._config.server.recovery.step_timeout_s
        logger.warning("%s; at %g s it is ended (step_timeout)", text, limit_s)
        self._tell_frontend(RankSlow(text))
        for asked in pids if pid is None else [pid]:
            logger.warning("process %d: %s", asked, ask_for_stacks(asked))

    def _form_anew(self, lost: list[Rank], rank: int | None, reason: str) -> None:
        epoch = self._group.epoch + 1
        logger.error(
            "%s. Forming the group anew, as epoch %d (recovery %d of at most %d in %d minutes)",
            *(reason, epoch, self._budget.num_taken, self._budget.most, WINDOW_S // 60),
        )
        # First of all, so that nothing of the new epoch comes to a front end that knows nothing.
        self._tell_frontend(Regrouping(epoch=epoch, rank=rank, error=reason))
        self._is_stalled = False
        self._group.form_anew(lost)

    def _can_recover(self, ended: list[Rank]) -> bool:
        """Whether it is wanted, may help, and has not happened too often; takes one of those."""
        if not (self._recovers and self._has_been_ready):
            return False
        codes = {rank.failure.exit_code for rank in ended if rank.failure is not None}
        return not codes & FOR_GOOD and self._may_try_again()

    def _may_try_again(self) -> bool:
        if self._budget.take():
            return True
        logger.error(
            "%d recoveries in %d minutes are too many: giving up (max_restarts)",
            *(self._budget.most, WINDOW_S // 60),
        )
        return False

    def _on_frontend_end(self) -> int | None:
        """Replace it, or return the exit code where that is of no use."""
        assert self._frontend is not None and self._frontend_pipe is not None
        if not self._frontend_pipe.closed:
            self._read_frontend()
        failure = self._frontend_failure
        if failure is not None:
            # First the ranks, so that the reason is the last line of the log.
            self._end_all(0.0)
            logger.error("the HTTP front end failed: %s", failure.error)
            return failure.exit_code
        how = describe_exit(self._frontend.exitcode)
        if not (self._recovers and self._has_been_ready and self._budget.take()):
            logger.error("the HTTP front end ended: %s", how)
            return EXIT_RANK_DIED
        logger.error("the HTTP front end ended: %s. Starting another one on the same port", how)
        # At once, so that they free what nobody waits for any more.
        number = self._num_frontends
        self._group.turn_to_frontend(number, self._wiring.place(number, 0).wire.address)
        self._frontend_pipe.close()
        self._start_frontend()
        return None

    def _wait_for_news(self, timeout_s: float | None) -> list[object]:
        """Block until a signal, a message, or the end of a process."""
        assert self._frontend is not None and self._frontend_pipe is not None
        sources: list[object] = [self._signal_reader, self._frontend.sentinel]
        sources += [rank.process.sentinel for rank in self._group.ranks]
        sources += self._group.pipes
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
                if isinstance(message, GroupReady):
                    self._has_been_ready = True
                    self._group.on_formed(message.epoch)
                elif isinstance(message, StopAsked):
                    self._signals.append(signal.SIGTERM)
                elif isinstance(message, Active) and self._config.nodes is None:
                    self._group.watchdog.on_wake(message.wake_number)
                if isinstance(message, FrontendFailure):
                    self._frontend_failure = message
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
        if not self._has_been_ready:
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
            due_s = self._group.time_left_s
            wait_s = remaining if due_s is None else min(due_s, remaining)
            for message in self._wait_for_news(wait_s):
                if isinstance(message, Drained):
                    if message.num_unfinished:
                        logger.warning("%d request(s) did not finish", message.num_unfinished)
                    return 0
            if self._frontend is None or not self._frontend.is_alive():
                return EXIT_RANK_DIED
            failed = [rank for rank in self._group.ended if rank.process.exitcode != 0]
            exit_code = self._look_after_ranks(failed)
            if exit_code is not None:
                return exit_code
        logger.warning("the HTTP front end did not drain in time")
        return 0

    def _end_with_ranks(self, ended: list[Rank]) -> int:
        """Tell the clients, collect everybody's words, report the cause last."""
        first, ranks = ended[0], self._group.ranks
        self._tell_frontend(RankLost(rank=first.rank, error=first.report()))
        # Nobody will leave by itself.
        self._has_been_ready = self._has_been_ready and not self._config.stays_in_process
        deadline = time.monotonic() + FAILURE_GATHERING_S
        while any(rank.process.is_alive() for rank in ranks):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait([r.process.sentinel for r in ranks], remaining):
                break
            # `wait` returns at once for those that have ended already.
            time.sleep(0.02)
        ended = self._group.ended or ended
        self._await_drained(FLUSH_S)
        return report_end(ended, first)

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
        self._end_all(LEAVE_S if self._has_been_ready else 0.0)

    def _end_all(self, patience_s: float) -> None:
        processes = [rank.process for rank in self._group.ranks]
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
