"""A node's keeper, as seen by the rank that starts it."""

import contextlib
import logging
import multiprocessing
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from moed.config.engine_config import EngineConfig
from moed.server.http_socket import bind_http, url_of
from moed.server.lifecycle import die_with_parent
from moed.server.messages import LinkLost, ToKeeper

logger = logging.getLogger(__name__)

CLOSE_S = 3.0

_link_lost = msgspec.msgpack.Decoder(LinkLost)


def start_keeper(config: EngineConfig, probe_socket: socket.socket, pipe: Connection) -> None:
    """Target of the process: its imports stay out of the rank."""
    die_with_parent()
    from moed.server.keeper import run_keeper

    run_keeper(config, probe_socket, pipe)


class KeeperProcess:
    """Answers probes from the start on; `on_lost` is called in a thread when the link is lost.

    Raises `ConfigError` when the probes' port cannot be bound.
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]) -> None:
        assert config.nodes is not None
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._on_lost = on_lost
        self._is_closing = False
        host, port = config.server.host, config.nodes.probe_port
        with bind_http(host, port, "--probe-port") as probe_socket:
            self._process = context.Process(
                name="moed-node", target=start_keeper, args=(config, probe_socket, far_end)
            )
            self._process.start()
            logger.info(
                "started node: process %d, probes on %s/readyz",
                self._process.pid,
                url_of(probe_socket, config.server),
            )
        far_end.close()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, message: ToKeeper) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def _listen(self) -> None:
        try:
            self._on_lost(_link_lost.decode(self._pipe.recv_bytes()).error)
        except (EOFError, OSError):
            if not self._is_closing:
                self._on_lost("the process that answers this node's probes ended by itself")

    def close(self) -> None:
        """End the process, within a bound."""
        self._is_closing = True
        self._process.kill()
        self._process.join(CLOSE_S)
