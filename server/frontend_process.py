"""The launcher's end of the front end: its process, and the pipe between them."""

import contextlib
import logging
import socket
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess

import msgspec

from moed.config.engine_config import EngineConfig
from moed.server.http_socket import url_of
from moed.server.lifecycle import FrontendPlace, die_with_parent
from moed.server.messages import (
    Drained,
    FromFrontend,
    FrontendFailure,
    GroupReady,
    Serving,
    StopNow,
    ToFrontend,
)
from moed.server.processes import spawn

logger = logging.getLogger(__name__)

READY = """ready: %s on %d rank(s), backend %s, at most %d tokens per request

  Try it:  curl %s/chat/completions -H 'Content-Type: application/json' \\
             -d '{"messages": [{"role": "user", "content": "12 + 30"}]}'
  Python:  openai.OpenAI(base_url="%s", api_key="none")
  Stop:    Ctrl-C lets open requests finish; a second one stops at once
"""

_from_frontend = msgspec.msgpack.Decoder(FromFrontend)


def run_frontend_process(
    config: EngineConfig,
    http_socket: socket.socket,
    place: FrontendPlace,
    launcher_pipe: Connection,
) -> None:
    """Target of the process: its heavy imports stay out of the launcher."""
    die_with_parent()
    from moed.server.frontend import run_frontend

    run_frontend(config, http_socket, place, launcher_pipe)


def log_progress(config: EngineConfig, url: str, message: FromFrontend) -> None:
    """Say in the log what the front end, which answers at `url`, has reported."""
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


class FrontendProcess:
    """One front end after the other: `start` puts another one in the place of the last."""

    def __init__(
        self, config: EngineConfig, http_socket: socket.socket, context: SpawnContext
    ) -> None:
        self._config = config
        self._http_socket = http_socket
        self._context = context
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self.failure: FrontendFailure | None = None
        """Its last words."""
        self.drained: Drained | None = None
        """What it has answered to the end of the group, or of the launch."""

    def start(self, place: FrontendPlace) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe, far_end = self._context.Pipe()
        arguments = (self._config, self._http_socket, place, far_end)
        self._process = spawn(self._context, "moed-http", run_frontend_process, arguments)
        far_end.close()

    @property
    def process(self) -> SpawnProcess:
        assert self._process is not None
        return self._process

    @property
    def processes(self) -> list[SpawnProcess]:
        """The one that there is, if any."""
        return [] if self._process is None else [self._process]

    @property
    def sources(self) -> list[Connection | int]:
        """For `wait`: it has something to say, or has ended."""
        assert self._pipe is not None
        ended: list[Connection | int] = [self.process.sentinel]
        return ended if self._pipe.closed else [self._pipe, *ended]

    def tell(self, message: ToFrontend) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except (OSError, ValueError):
            logger.warning(
                "the HTTP front end is gone and could not be told: %s", type(message).__name__
            )

    def read(self) -> list[FromFrontend]:
        """What it has said since the last time."""
        assert self._pipe is not None
        messages: list[FromFrontend] = []
        try:
            while not self._pipe.closed and self._pipe.poll():
                messages.append(self._take(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._pipe.close()
        return messages

    def _take(self, data: bytes) -> FromFrontend:
        message = _from_frontend.decode(data)
        if isinstance(message, FrontendFailure):
            self.failure = message
        elif isinstance(message, Drained):
            self.drained = message
        log_progress(self._config, url_of(self._http_socket, self._config.server), message)
        return message

    def await_drained(self, timeout_s: float) -> None:
        """Wait until it has told its clients, or is gone."""
        assert self._pipe is not None
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0 and self.process.is_alive():
            self.read()
            if self.drained is not None or self._pipe.closed:
                return
            wait(self.sources, remaining)

    def stop(self) -> None:
        """Have it leave, if there is one. Safe to call twice."""
        with contextlib.suppress(OSError, ValueError):
            if self._pipe is not None:
                self._pipe.send_bytes(msgspec.msgpack.encode(StopNow()))
