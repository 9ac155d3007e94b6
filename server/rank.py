"""The process of one DP rank: join the group, start the engine, run it, and say why it ended."""

import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError, PeerLost
from moed.dist.launch import LaunchEnvironment
from moed.server.lifecycle import die_with_parent
from moed.server.logs import setup_logging
from moed.server.messages import RankFailure

if TYPE_CHECKING:
    from moed.dist.groups import Groups

logger = logging.getLogger(__name__)


def run_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    store_socket: socket.socket | None,
    channel_address: str,
    failures: Connection,
) -> None:
    """Target of a rank's process. Rank 0 receives the store's listening socket.

    Leaves with 0 after a group-wide stop; otherwise sends a `RankFailure` and leaves with its code.
    """
    die_with_parent()
    # A terminal's Ctrl-C reaches every process; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = config.server
    setup_logging(f"rank {environment.rank}", server.log_level, server.observability.log_format)
    try:
        listen_fd = None if store_socket is None else store_socket.detach()
        serve_rank(config, environment, listen_fd, lambda _: channel_address)
    except Exception as error:
        failure = describe_failure(environment.rank, error)
        failures.send_bytes(msgspec.msgpack.encode(failure))
        sys.exit(failure.exit_code)


def serve_rank(
    config: EngineConfig,
    environment: LaunchEnvironment,
    listen_fd: int | None,
    channel_address: Callable[["Groups"], str],
) -> None:
    """Join, start, run: returns after a group-wide stop, raises what went wrong otherwise."""
    started = time.monotonic()
    # Heavy: torch comes in here, in the rank only.
    import torch

    from moed.dist.groups import init_groups
    from moed.server.channel import EngineChannel
    from moed.server.engine import Engine

    torch.set_num_threads(config.parallel.num_threads)
    imported = time.monotonic()
    groups = init_groups(environment, config.parallel, listen_fd)
    try:
        channel = EngineChannel(channel_address(groups), environment.rank)
        try:
            phases = {"import": imported - started, "rendezvous": time.monotonic() - imported}
            engine = Engine(config, groups, channel)
            engine.start(phases)
            engine.run()
        finally:
            channel.close()
    finally:
        groups.close()


def describe_failure(rank: int, error: BaseException) -> RankFailure:
    """The rank's last words: a known fault in one paragraph, our own with its traceback."""
    expected = isinstance(error, MoedError)
    return RankFailure(
        rank=rank,
        error=str(error) if expected else f"{type(error).__name__}: {error}",
        details="" if expected else "".join(traceback.format_exception(error)),
        is_consequence=isinstance(error, PeerLost),
        exit_code=error.exit_code if isinstance(error, MoedError) else 70,
    )
