"""The keeper of a node other than the first: answers its probes, and keeps up the link to the front
end, by which the launchers talk, in a small process beside the ranks. Imports no torch.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from multiprocessing.connection import Connection

import msgspec
import uvicorn
import uvloop
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moed.config.engine_config import EngineConfig
from moed.server.channel import connect, node_identity
from moed.server.http_server import HttpServer
from moed.server.lifecycle import die_with_parent
from moed.server.links import BEAT_S, SILENT_S, lost_after_s
from moed.server.logs import setup_logging
from moed.server.node_messages import (
    Beat,
    FromNode,
    Joined,
    LinkLost,
    NodeBeat,
    NodeOrder,
    NodeReport,
    NodeStopping,
    Over,
    RanksReady,
    ToKeeper,
    ToNode,
)
from moed.server.wire import Wire

logger = logging.getLogger(__name__)

LIVE_PATH, STARTED_PATH = "/livez", "/startupz"
READINESS_PATHS = ("/readyz", "/ready", "/health", "/ping")

_to_keeper = msgspec.msgpack.Decoder(ToKeeper)
_to_node = msgspec.msgpack.Decoder(ToNode)


def run_keeper(config: EngineConfig, probe_socket: socket.socket, pipe: Connection) -> None:
    """Target of the keeper's process; ends with its parent."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup_logging("node", config.server.log_level, config.server.observability.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Keeper(config, probe_socket, pipe).run())


class Keeper:
    """What this node's probes say, and why."""

    def __init__(self, config: EngineConfig, probe_socket: socket.socket, pipe: Connection) -> None:
        self._config = config
        self._probe_socket = probe_socket
        self._pipe = pipe
        self._joined: Joined | None = None
        self._has_started = False
        self._is_stopping = False
        self._trouble = ""
        self._heard_at = time.monotonic()
        self._link: zmq.asyncio.Socket | None = None
        self._beating: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    async def run(self) -> None:
        """Until the parent is gone."""
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read_pipe)
        server = HttpServer(self._uvicorn_config())
        http = asyncio.create_task(server.serve(sockets=[self._probe_socket]))
        await self._gone.wait()
        server.stop()
        await http
        if self._beating is not None:
            self._beating.cancel()

    def _read_pipe(self) -> None:
        try:
            while self._pipe.poll():
                self.obey(_to_keeper.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._gone.set()

    def obey(self, message: ToKeeper) -> None:
        match message:
            case Joined():
                self._joined = message
                self._heard_at = time.monotonic()
                self._beating = asyncio.create_task(self._beat(message))
            case RanksReady():
                self._has_started = True
            case NodeStopping():
                self._is_stopping = True
            case NodeReport():
                self._send(message)

    # The link ------------------------------------------------------------------------------------

    async def _beat(self, joined: Joined) -> None:
        """Send a beat every second; any answer counts."""
        context = zmq.asyncio.Context(io_threads=1)
        self._link = link = context.socket(zmq.DEALER)
        connect(link, Wire(joined.address, joined.secret), node_identity(joined.node))
        try:
            while True:
                self._send(NodeBeat(joined.node, joined.name, joined.ranks, self._is_stopping))
                waiting_since = time.monotonic()
                while (left := waiting_since + BEAT_S - time.monotonic()) > 0:
                    if await link.poll(int(left * 1000) + 1):
                        self._hear(await link.recv())
                # What came while this process itself stood still is read first.
                if time.monotonic() - waiting_since < 2 * BEAT_S:
                    self._check_silence()
        finally:
            self._link = None
            link.close(0)
            context.term()

    def _send(self, message: FromNode) -> None:
        """What finds no place is dropped: it is said again soon."""
        if self._link is not None:
            sent = self._link.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
            asyncio.ensure_future(sent).add_done_callback(lambda done: done.exception())

    def _hear(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            message = _to_node.decode(data)
        except msgspec.MsgspecError as error:
            logger.error("dropped what no first node of this version sends: %s", error)
            return
        if isinstance(message, NodeOrder):
            self._trouble = message.trouble
        if not isinstance(message, Beat):
            self._tell(message)

    def _tell(self, message: LinkLost | NodeOrder | Over) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    @property
    def silence_s(self) -> float:
        """How long the first node has not been heard."""
        return time.monotonic() - self._heard_at

    def _check_silence(self) -> None:
        if self.silence_s > lost_after_s(self._config) and not self._is_stopping:
            nodes = self._config.nodes
            assert nodes is not None
            self._tell(
                LinkLost(
                    f"the first node, {nodes.master_addr}, has been silent for "
                    f"{self.silence_s:.0f} s: it ended, as its log then says, or the network "
                    "between is cut"
                )
            )

    # Probes --------------------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why this node is not ready; None when it is."""
        if self._is_stopping:
            return "the node is shutting down"
        if self._joined is None:
            return "waiting for the ranks of all nodes to meet"
        if not self._has_started:
            return "the model is loading"
        if self.silence_s > SILENT_S:
            return f"the first node has been silent for {self.silence_s:.0f} s"
        return self._trouble or None

    def _answer(self, is_good: bool) -> Response:
        joined = self._joined
        body = {
            "status": "ready" if self.reason is None else "not ready",
            "reason": self.reason,
            "node": None if joined is None else joined.node,
            "ranks": [] if joined is None else joined.ranks,
        }
        return Response(
            msgspec.json.encode(body),
            200 if is_good else 503,
            {"Cache-Control": "no-cache"},
            "application/json",
        )

    def app(self) -> Starlette:
        """The probes, and nothing else."""

        async def live(request: Request) -> Response:
            return self._answer(True)

        async def started(request: Request) -> Response:
            return self._answer(self._has_started)

        async def ready(request: Request) -> Response:
            return self._answer(self.reason is None)

        answers = {LIVE_PATH: live, STARTED_PATH: started, **dict.fromkeys(READINESS_PATHS, ready)}
        return Starlette(routes=[Route(path, answer) for path, answer in answers.items()])

    def _uvicorn_config(self) -> uvicorn.Config:
        tls = self._config.server.tls
        return uvicorn.Config(
            self.app(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
            timeout_graceful_shutdown=1,
        )
