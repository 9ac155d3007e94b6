"""The process of the HTTP front end: answers from its first second on, serves once the ranks are
ready, drains and stops as the launcher says.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Generator
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
from moed.server.grammar_checker import GrammarChecker
from moed.server.health import Health
from moed.server.lifecycle import die_with_parent
from moed.server.logs import setup_logging
from moed.server.messages import (
    Drain,
    Drained,
    FromFrontend,
    FrontendFailure,
    GroupReady,
    RankLost,
    RankReady,
    Serving,
    StopNow,
    ToFrontend,
)
from moed.server.metrics import Metrics
from moed.server.request_log import log_request
from moed.server.status_line import tell_status

logger = logging.getLogger(__name__)

# Once their error event is written, clients get this long to take it.
FLUSH_S = 1.0
# Connections that are still open when the server leaves.
CLOSE_S = 1
KEEP_CONNECTION_S = 75
DATE_RENEWAL_S = 1.0

_to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def run_frontend(
    config: EngineConfig,
    http_socket: socket.socket,
    channel_address: str,
    launcher_pipe: Connection,
) -> None:
    """Target of the front end's process; returns after a stop."""
    die_with_parent()
    # A terminal's Ctrl-C, or a supervisor's signal to the group, reaches every process; the
    # launcher alone decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup_logging("http", config.server.log_level, config.server.observability.log_format)
    # uvicorn's own story of its start; the launcher tells it better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(is_worth_logging)
    frontend = Frontend(config, http_socket, channel_address, launcher_pipe)
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


class HttpServer(uvicorn.Server):
    """uvicorn, without its own idea of signals, and with a call when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Renew the Date header once a second; uvicorn's own loop looks for the end ten times."""
        while not self.should_exit:
            # Every call with a multiple of ten renews it.
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), DATE_RENEWAL_S)

    def stop(self) -> None:
        """Leave, with what connections are still open after `CLOSE_S` cut off."""
        self.should_exit = True
        self._stopped.set()

    async def wait_started(self) -> None:
        while not self.started:
            await asyncio.sleep(0.005)


class Frontend:
    """Everything that lives in the front end's process."""

    def __init__(
        self,
        config: EngineConfig,
        http_socket: socket.socket,
        channel_address: str,
        launcher_pipe: Connection,
    ) -> None:
        self._config = config
        self._http_socket = http_socket
        self._channel_address = channel_address
        self._pipe = launcher_pipe
        self._commands: asyncio.Queue[ToFrontend] = asyncio.Queue()
        self._is_serving = False
        self._has_announced = False

    async def serve(self) -> None:
        """Serve until `StopNow`, or until the launcher is gone."""
        channel = FrontendChannel(self._channel_address)
        health = Health(self._config.parallel.world_size)
        metrics = Metrics(self._config)
        self._engine = EngineClient(self._config, channel, health, metrics)
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
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read_pipe)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._engine.run(self._on_rank_ready)),
                    tasks.create_task(self._load_text_tools()),
                    tasks.create_task(self._announce()),
                    tasks.create_task(tell_status(metrics.all_stats)),
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
        if self._state.health.is_ready and self._is_serving and not self._has_announced:
            self._has_announced = True
            self._tell(
                GroupReady(
                    num_kv_blocks=self._engine.num_kv_blocks,
                    max_model_len=self._engine.context_length,
                )
            )

    # The launcher --------------------------------------------------------------------------------

    def _read_pipe(self) -> None:
        try:
            while self._pipe.poll():
                self._commands.put_nowait(_to_frontend.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            # The launcher is gone: there is nobody left to serve for.
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._commands.put_nowait(StopNow())

    def _tell(self, message: FromFrontend) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    async def _obey(self) -> None:
        """Do what the launcher says, until it says to stop."""
        draining: asyncio.Task[None] | None = None
        while True:
            command = await self._commands.get()
            match command:
                case RankLost(rank, error):
                    self._state.health.fail(rank, error)
                    self._state.metrics.on_rank_lost(rank)
                    num_unfinished = self._engine.lose_group(error)
                    await self._state.open_requests.wait_empty(FLUSH_S)
                    self._tell(Drained(num_unfinished=num_unfinished))
                case Drain():
                    if draining is None:
                        self._state.health.announce_drain()
                        draining = asyncio.create_task(self._drain())
                case StopNow():
                    if draining is not None:
                        draining.cancel()
                    self._state.health.drain()
                    self._engine.fail_all("the server is stopping")
                    self._engine.shut_down()
                    await self._state.open_requests.wait_empty(FLUSH_S)
                    return

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
