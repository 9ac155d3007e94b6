"""Every process that exists, who starts it, how it reports ready, and how all of them end.

    moed serve ─ launcher (this process: no torch, no HTTP)
                  ├─ front end (HTTP, on a socket that the launcher has bound)
                  └─ rank 0 … rank N-1
    moed serve --node-rank 1, on another node: see `moed.server.node_launcher`

Start, watch, stop are three calls in a row. A rank that ends on its own costs no request: the group
is formed anew (`moed.server.recovery` decides, `moed.server.rank_group` does it) while the front
end holds what is open, and a front end that ends is replaced on the same port. Where that is not
wanted, cannot help, or has happened too often, open requests get an error event, the failing rank's
own error is reported last, and the exit code tells the kind of fault.
"""

import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from moed.config.engine_config import EngineConfig
from moed.server.endings import (
    DRAIN_SLACK_S,
    EXIT_PROCESS_DIED,
    FAILURE_GATHERING_S,
    FLUSH_S,
    LEAVE_S,
    report_end,
)
from moed.server.frontend_process import FrontendProcess
from moed.server.http_socket import bind_http
from moed.server.late_node import Reception
from moed.server.lifecycle import FrontendPlace, describe_exit
from moed.server.messages import (
    Active,
    Drain,
    FromFrontend,
    GroupReady,
    RankLost,
    StopAsked,
    StopNow,
)
from moed.server.node_messages import NodeReport
from moed.server.processes import StopSignals
from moed.server.rank_group import RankGroup
from moed.server.rank_process import AnyRank
from moed.server.recovery import Recovery
from moed.server.wiring import Wiring, bind_store, open_wire

logger = logging.getLogger(__name__)

GATHERING_LOOK_S = 0.02


def serve(config: EngineConfig) -> int:
    """Serve until told to stop or until a process fails; returns the exit code of `moed serve`.

    Raises `ConfigError` when the HTTP port cannot be bound.
    """
    server = config.server
    http_socket = bind_http(server.host, server.port, "--port")
    with (
        http_socket,
        bind_store(config, 0) as store_socket,
        open_wire(config) as wiring,
        Supervisor(config, http_socket, wiring) as group,
    ):
        group.start(store_socket)
        exit_code = group.watch()
        group.stop()
    return exit_code


class Supervisor:
    """Holds all processes of one launch. Use as a context: leaving it ends whatever still runs."""

    def __init__(self, config: EngineConfig, http_socket: socket.socket, wiring: Wiring) -> None:
        self._config = config
        self._wiring = wiring
        context = multiprocessing.get_context("spawn")
        self._frontend = FrontendProcess(config, http_socket, context)
        self._num_frontends = 0
        self._group = RankGroup(config, context, wiring.told, self._frontend.tell)
        self._recovery = Recovery(config, self._group, self._frontend.tell)
        self._signals = StopSignals(context)
        self._reception: Reception | None = None

    def __enter__(self) -> "Supervisor":
        self._signals.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all(0.0)

    # Start ---------------------------------------------------------------------------------------

    def start(self, store_socket: socket.socket) -> None:
        """Start the front end and one process per rank of this node; returns at once. Keep the
        socket open.
        """
        if self._config.nodes is not None:
            self._reception = Reception(store_socket, self._wiring.told)
        self._start_frontend()
        self._group.start(store_socket)

    @property
    def _frontend_place(self) -> FrontendPlace:
        """Of the next one."""
        return self._wiring.place(self._num_frontends, self._group.epoch)

    def _start_frontend(self) -> None:
        self._frontend.start(self._frontend_place)
        self._num_frontends += 1

    # Watch ---------------------------------------------------------------------------------------

    def watch(self) -> int:
        """Wait for a signal or for the end of a process, and act on it; returns the exit code."""
        while not self._signals.numbers:
            exit_code = self._look_after_processes(self._group.ended)
            if exit_code is not None:
                return exit_code
            self._wait_for_news(self._group.time_left_s)
        return self._drain()

    def _look_after_processes(self, ended: Sequence[AnyRank]) -> int | None:
        """Start again what is worth it. Returns the exit code where it is of no use."""
        if with_these := self._recovery.look_after(ended):
            return self._end_with_ranks(with_these)
        return None if self._frontend.process.is_alive() else self._on_frontend_end()

    def _on_frontend_end(self) -> int | None:
        """Replace it, or return the exit code where that is of no use."""
        self._take(self._frontend.read())
        failure = self._frontend.failure
        if failure is not None:
            # First the ranks, so that the reason is the last line of the log.
            self._end_all(0.0)
            logger.error("the HTTP front end failed: %s", failure.error)
            return failure.exit_code
        how = describe_exit(self._frontend.process.exitcode)
        if not self._recovery.may_replace_frontend():
            logger.error("the HTTP front end ended: %s", how)
            return EXIT_PROCESS_DIED
        logger.error("the HTTP front end ended: %s. Starting another one on the same port", how)
        # At once, so that they free what nobody waits for any more.
        self._group.turn_to_frontend(self._frontend_place)
        self._start_frontend()
        return None

    def _wait_for_news(self, timeout_s: float | None) -> None:
        """Block until a signal, a message, or the end of a process; take in what was said."""
        sources: list[Connection | socket.socket | int]
        sources = [self._signals.reader, *self._frontend.sources, *self._group.sources]
        reception = self._reception if self._group.epoch else None
        if reception is not None:
            sources.append(reception.listener)
        ready = wait(sources, timeout_s)
        self._signals.clear(ready)
        if reception is not None and reception.listener in ready:
            reception.answer(self._group.missing_nodes)
        self._take(self._frontend.read())

    def _take(self, messages: Sequence[FromFrontend]) -> None:
        for message in messages:
            match message:
                case GroupReady():
                    self._recovery.on_ready(message.epoch)
                case StopAsked():
                    self._signals.numbers.append(signal.SIGTERM)
                case Active(wake_number):
                    self._group.watchdog.on_wake(wake_number)
                case NodeReport():
                    self._group.on_report(message)

    # Stop ----------------------------------------------------------------------------------------

    def _drain(self) -> int:
        """After a signal: let open requests finish; a second signal, or a rank's end, cuts it
        short.
        """
        if not self._recovery.has_been_ready:
            logger.info("stopping before the ranks are ready: no request is open")
            return 0
        timeout_s = self._config.server.shutdown_timeout_s
        logger.info("stopping: open requests get up to %g s; signal again to stop now", timeout_s)
        self._frontend.tell(Drain())
        deadline = time.monotonic() + timeout_s + DRAIN_SLACK_S
        while (remaining := deadline - time.monotonic()) > 0:
            if len(self._signals.numbers) > 1:
                logger.warning("second signal: stopping now")
                self._frontend.tell(StopNow())
                return 128 + self._signals.numbers[-1]
            due_s = self._group.time_left_s
            self._wait_for_news(remaining if due_s is None else min(due_s, remaining))
            if (drained := self._frontend.drained) is not None:
                if drained.num_unfinished:
                    logger.warning("%d request(s) did not finish", drained.num_unfinished)
                return 0
            if not self._frontend.process.is_alive():
                return EXIT_PROCESS_DIED
            failed = [rank for rank in self._group.ended if rank.exit_code != 0]
            if with_these := self._recovery.look_after(failed):
                return self._end_with_ranks(with_these)
        logger.warning("the HTTP front end did not drain in time")
        return 0

    def _end_with_ranks(self, ended: Sequence[AnyRank]) -> int:
        """Tell the clients, collect everybody's words, report the cause last."""
        first = ended[0]
        self._frontend.tell(RankLost(rank=first.rank, error=first.report()))
        deadline = time.monotonic() + FAILURE_GATHERING_S
        while len(self._group.ended) < len(self._group.ranks) and time.monotonic() < deadline:
            self._take(self._frontend.read())
            time.sleep(GATHERING_LOOK_S)
        ended = self._group.ended or ended
        self._frontend.await_drained(FLUSH_S)
        # Nobody will leave by itself.
        self._recovery.has_been_ready &= not self._config.stays_in_process
        # Before the report, whose last line is the last of the log.
        self.stop()
        return report_end(ended, first)

    def stop(self) -> None:
        """End all processes: those about to leave may, within a bound. Safe to call twice."""
        # Ranks that are still loading would not hear of it; they hold nothing worth waiting for.
        self._end_all(LEAVE_S if self._recovery.has_been_ready else 0.0)

    def _end_all(self, patience_s: float) -> None:
        ranks = [rank.process for rank in self._group.local.ranks]
        self._frontend.stop()
        now = time.monotonic()
        # The front end always leaves by itself, with its last lines written.
        patience = [
            (process, now + max(patience_s, FLUSH_S)) for process in self._frontend.processes
        ]
        patience += [(process, now + patience_s) for process in ranks]
        for process, deadline in patience:
            process.join(max(0.0, deadline - time.monotonic()))
        for process, _ in patience:
            if process.is_alive():
                process.kill()
                process.join()
