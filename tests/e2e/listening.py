"""What the processes of a launch listen on."""

import contextlib
import socket

import psutil

from tests.daemon import Daemon


def processes(daemon: Daemon) -> list[psutil.Process]:
    """The launcher and all below it."""
    launcher = psutil.Process(daemon.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def listeners(daemon: Daemon) -> set[tuple[str, int]]:
    """Address and port of all that takes connections, or datagrams, from anywhere."""
    found = set()
    for process in processes(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM:
                    found.add((one.laddr.ip, one.laddr.port))
    return found


def unix_listeners(daemon: Daemon) -> set[str]:
    """Paths of sockets that have one."""
    found = set()
    for process in processes(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            paths = {str(one.laddr) for one in process.net_connections("unix")}
            found |= {path for path in paths if path.startswith("/")}
    return found
