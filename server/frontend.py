"""The process of the HTTP front end: answers from its first second on, serves once the ranks are
ready, drains and stops as the launcher says.
"""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from multiprocessing.connection import Connection

import msgspec
import uvicorn
import uvloop

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError
from moed.server.api.app import create_app
from moed.server.api.http_protocol import HttpProtocol
from moed.server.api.probes import PROBE_PATHS
from moed.server.api.state import AppState, TextTools
from moed.server.channel import FrontendChannel
from moed.server.engine_client import EngineClient
from moed.server.garbage import look_seldom
from moed.server.grammar_checker import GrammarChecker
from moed.server.health import Health
from moed.server.http_server import HttpServer
from moed.server.lifecycle import FrontendPlace
from moed.server.links import Links, lost_after_s
from moed.server.logs import setup_logging
from moed.server.messages import (
    Active,
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    GroupReady,
    LastLaunch,
    RankLost,
    RankReady,
    RankSlow,
    Regrouping,
    Serving,
    StopAsked,
    StopNow,
    ToFrontend,
)
from moed.server.metrics import Metrics
from moed.server.node_messages import NodeOrder
from moed.server.request_log import log_request
from moed.server.status_line import tell_status
from moed.server.succession import Heirs

logger = logging.getLogger(__name__)

# Once their error event is written, clients get this long to take it.
FLUSH_S = 1.0
# Connections that are still open when the server leaves.
CLOSE_S = 1
KEEP_CONNECTION_S = 75
WAKE_INTERVAL_S = 1.0

_to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def run_frontend(
    config: EngineConfig,
    http_socket: socket.socket,
    place: FrontendPlace,
    launcher_pipe: Connection,
    heirs: Heirs | None = None,
) -> None:
    """Of the front end's process; returns after a stop, or when the launcher is gone and has no
    `heirs`.
    """
    # A terminal's Ctrl-C, or a supervisor's signal to the group, reaches every process; the
    # launcher alone decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup_logging("http", config.server.log_level, config.server.observability.log_format)
    # uvicorn's own story of its start; the launcher tells it better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(is_worth_logging)
    frontend = Frontend(config, http_socket, place, launcher_pipe, heirs)
    look_seldom()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(frontend.serve())
    except MoedError as error:
        last_words = FrontendFailure(error=str(error), exit_code=error.exit_code)
        with contextlib.suppress(OSError):
            launcher_pipe.send_bytes(msgspec.msgpack.encode(last_words))
        sys.exit(error.exit_code)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """False for probes and scrapes, which come every few seconds for ever."""
    arguments = record.args
    # uvicorn's (client, method, path, HTTP version, status)
    return not (
        isinstance(arguments, tuple)
        and len(arguments) == 5
        and str(arguments[2]).partition("?")[0] in PROBE_PATHS | {"/metrics"}
    )


class Frontend:
    """Everything that lives in the front end's process."""

    def __init__(
        self,
        config: EngineConfig,
        http_socket: socket.socket,
        place: FrontendPlace,
        launcher_pipe: Connection,
        heirs: Heirs | None = None,
    ) -> None:
        self._config = config
        self._http_socket = http_socket
        self._place = place
        self._pipe = launcher_pipe
        self._heirs = heirs
        self._is_last_launch = heirs is None
        self._draining: asyncio.Task[None] | None = None
        self._commands: asyncio.Queue[ToFrontend] = asyncio.Queue()
        self._is_serving = False
        self._told_wake_at = -math.inf
        self._wake_timer: asyncio.TimerHandle | None = None
        self._has_announced = False
        self._late_heirs: list[Connection] = []

    async def serve(self) -> None:
        """Serve until `StopNow`, or until the launcher is gone."""
        listener = self._place.listener
        listen_fd = None if listener is None else listener.detach()
        channel = FrontendChannel(self._place.wire, listen_fd, self._place.epoch)
        health = Health(self._config.parallel.world_size)
        lost_s = lost_after_s(self._config)
        links = Links(channel, health, lambda: self._tell(StopAsked()), self._tell, lost_s)
        self._links = links
        metrics = Metrics(self._config)
        self._engine = EngineClient(self._config, links, health, metrics, place=self._place)
        self._engine.on_wake = self._on_wake
        observability, tracing = self._config.server.observability, None
        if observability.log_requests:
            self._engine.on_request_end.append(log_request)
        if observability.otlp_traces_endpoint is not None:
            # Its package is there: the settings were checked.
            from moed.server.tracing import Tracing

            tracing = Tracing.to_endpoint(observability.otlp_traces_endpoint)
            self._engine.on_request_end.append(tracing.on_request_end)
        grammars = GrammarChecker(self._config.model)
        self._state = AppState(self._config, self._engine, health, metrics, grammars)
        self._server = HttpServer(self._uvicorn_config())
        self._listen_to_launcher()
        if self._heirs is not None:
            succession, loop = self._heirs.succession, asyncio.get_running_loop()
            loop.add_reader(succession.listener.fileno(), self._on_heir)
            loop.add_reader(succession.agent_fd, self._on_torchrun_end)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._engine.run(self._on_rank_ready)),
                    tasks.create_task(self._load_text_tools()),
                    tasks.create_task(self._announce()),
                    tasks.create_task(tell_status(metrics.all_stats)),
                    tasks.create_task(self._watch(links)),
                ]
                http = tasks.create_task(self._server.serve(sockets=[self._http_socket]))
                await self._obey()
                self._server.stop()
                await http
                for task in background:
                    task.cancel()
        except* MoedError as group:
            raise group.exceptions[0] from None
        finally:
            grammars.close()
            channel.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    async def _watch(self, links: Links) -> None:
        """Raises `PeerLost` for a node that is gone, once the clients know."""
        try:
            await links.watch()
        except MoedError as error:
            links.end_all(str(error))
            self._engine.lose_group(str(error))
            await self._state.open_requests.wait_empty(FLUSH_S)
            raise

    def _uvicorn_config(self) -> uvicorn.Config:
        tls = self._config.server.tls
        return uvicorn.Config(
            create_app(self._state),
            http=HttpProtocol.patient_for(self._config.server.slow_reader_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=self._config.server.access_log,
            server_header=False,
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=CLOSE_S,
        )

    # Getting ready -------------------------------------------------------------------------------

    async def _announce(self) -> None:
        await self._server.wait_started()
        self._tell(Serving())
        self._is_serving = True
        self._check_ready()

    async def _load_text_tools(self) -> None:
        tools = await asyncio.to_thread(TextTools.load, self._config)
        self._state.text = tools
        logger.info(
            "tool calls: %s; reasoning: %s",
            "no format" if tools.tool_format is None else tools.tool_format.name,
            "no format" if tools.reasoning_format is None else tools.reasoning_format.name,
        )
        if not tools.is_read_back:
            logger.warning(
                "the calls that this model's chat template writes are not what the tool call "
                "parser reads: calls may come as text; choose another with --tool-call-parser"
            )
        self._state.health.on_tokenizer()
        self._check_ready()

    def _on_rank_ready(self, ready: RankReady) -> None:
        logger.info(
            "rank %d is ready (%s)",
            ready.rank,
            ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in ready.startup_s.items()),
        )
        self._check_ready()

    def _check_ready(self) -> None:
        # Also when it leaves meanwhile: the ranks must know that their group is complete.
        is_complete = self._state.health.is_complete
        if is_complete and self._is_serving and not self._has_announced:
            self._has_announced = True
            self._tell(
                GroupReady(
                    num_kv_blocks=self._engine.num_kv_blocks,
                    max_model_len=self._engine.context_length,
                    epoch=self._engine.epoch,
                )
            )

    # The launcher --------------------------------------------------------------------------------

    def _listen_to_launcher(self) -> None:
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read_pipe)

    def _read_pipe(self) -> None:
        try:
            while self._pipe.poll():
                self._commands.put_nowait(_to_frontend.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._lose_launcher()

    @property
    def _leaves_with_launcher(self) -> bool:
        return self._is_last_launch or self._engine.is_stopped

    def _lose_launcher(self) -> None:
        """Wait for another one, or leave: then there is nobody to serve for."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._leaves_with_launcher:
            self._commands.put_nowait(StopNow())
            return
        # The ranks are gone with it. A drain was for them to leave together.
        while not self._commands.empty():
            self._commands.get_nowait()
        self._stop_draining()
        self._state.health.stay()
        self._links.forget()
        self._on_regrouping(self._engine.epoch + 1, None, "torchrun starts all of them again")
        logger.warning("the ranks have ended: torchrun starts others, and open requests wait")

    def _on_heir(self) -> None:
        """Other ranks have come."""
        assert self._heirs is not None
        if (pipe := self._heirs.succession.accept()) is None:
            return
        if self._leaves_with_launcher:
            # Too late: the end of this process ends the pipe.
            self._late_heirs.append(pipe)
            return
        if not self._pipe.closed:
            self._lose_launcher()
        self._pipe = pipe
        self._tell(msgspec.structs.replace(self._heirs.wired, epoch=self._engine.epoch))
        self._listen_to_launcher()

    def _on_torchrun_end(self) -> None:
        """Nobody starts ranks any more."""
        assert self._heirs is not None
        asyncio.get_running_loop().remove_reader(self._heirs.succession.agent_fd)
        self._is_last_launch = True
        self._commands.put_nowait(RankLost(0, "torchrun has ended"))
        self._commands.put_nowait(StopNow())

    def _tell(self, message: FromFrontend) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    async def _obey(self) -> None:
        """Do what the launcher says, until it says to stop."""
        while True:
            command = await self._commands.get()
            match command:
                case RankLost(rank, error):
                    self._state.health.fail(rank, error)
                    self._state.metrics.on_rank_lost(rank)
                    self._links.end_all(error)
                    num_unfinished = self._engine.lose_group(error)
                    await self._state.open_requests.wait_empty(FLUSH_S)
                    self._tell(Drained(num_unfinished=num_unfinished))
                case Regrouping(epoch, rank, error):
                    self._on_regrouping(epoch, rank, error)
                case NodeOrder():
                    self._links.order(command)
                case RankSlow(error):
                    self._state.health.stall(error)
                case Drain():
                    if self._draining is None:
                        self._state.health.announce_drain()
                        self._draining = asyncio.create_task(self._drain())
                case LastLaunch():
                    self._is_last_launch = True
                case StopNow():
                    self._stop_draining()
                    self._state.health.drain()
                    self._engine.fail_all("the server is stopping")
                    self._engine.shut_down()
                    self._links.end_all("")
                    await self._state.open_requests.wait_empty(FLUSH_S)
                    return

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None

    def _on_wake(self, wake_number: int) -> None:
        """Tell the launcher, which watches the ranks then: at most once in `WAKE_INTERVAL_S`."""
        if self._wake_timer is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._told_wake_at + WAKE_INTERVAL_S - loop.time()
        self._wake_timer = loop.call_later(max(0.0, wait_s), self._tell_wake)

    def _tell_wake(self) -> None:
        self._wake_timer = None
        self._told_wake_at = asyncio.get_running_loop().time()
        self._tell(Active(self._engine.wake_number))

    def _on_regrouping(self, epoch: int, rank: int | None, error: str) -> None:
        self._state.health.recover(rank, error)
        self._state.metrics.on_regroup(rank)
        self._engine.hold(epoch)
        self._has_announced = False

    async def _drain(self) -> None:
        """Let open requests finish within the timeout, then have all ranks leave together."""
        timeout_s = self._config.server.shutdown_timeout_s
        delay_s = self._config.server.drain_delay_s
        health = self._state.health
        if delay_s and health.takes_requests:
            await asyncio.sleep(delay_s)
        else:
            delay_s = 0.0
        health.drain()
        num_unfinished = 0
        if not await self._state.open_requests.wait_empty(timeout_s - delay_s):
            num_unfinished = self._engine.fail_all(
                f"the server is shutting down, and this request took longer than the {timeout_s:g} "
                "s that it had left (shutdown_timeout)"
            )
            await self._state.open_requests.wait_empty(FLUSH_S)
        self._engine.shut_down()
        self._tell(Drained(num_unfinished=num_unfinished))
