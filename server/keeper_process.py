"""A node's keeper, as seen by who starts it: the node's launcher, or under torchrun a rank."""

import contextlib
import logging
import multiprocessing
import socket
from multiprocessing.connection import Connection

import msgspec

from moed.config.engine_config import EngineConfig
from moed.server.http_socket import bind_http, url_of
from moed.server.lifecycle import die_with_parent
from moed.server.node_messages import FromKeeper, ToKeeper
from moed.server.processes import spawn

logger = logging.getLogger(__name__)

CLOSE_S = 3.0
KEEPER_ENDED = "the process that answers this node's probes ended by itself"

_from_keeper = msgspec.msgpack.Decoder(FromKeeper)


def start_keeper(config: EngineConfig, probe_socket: socket.socket, pipe: Connection) -> None:
    """Target of the process: its imports stay out of who starts it."""
    die_with_parent()
    from moed.server.keeper import run_keeper

    run_keeper(config, probe_socket, pipe)


class KeeperProcess:
    """Answers probes from the start on. Raises `ConfigError` when their port cannot be bound."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.nodes is not None
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.is_closing = False
        host, port = config.server.host, config.nodes.probe_port
        with bind_http(host, port, "--probe-port") as probe_socket:
            self._process = spawn(
                context, "moed-node", start_keeper, (config, probe_socket, far_end)
            )
            logger.info("probes on %s/readyz", url_of(probe_socket, config.server))
        far_end.close()

    def tell(self, message: ToKeeper) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def receive(self) -> FromKeeper | None:
        """The next message; None: the process has ended."""
        try:
            return _from_keeper.decode(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """End the process, within a bound."""
        self.is_closing = True
        self._process.kill()
        self._process.join(CLOSE_S)
