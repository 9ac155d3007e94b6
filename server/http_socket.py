"""The listening sockets of HTTP, bound before anything else starts."""

import socket

from moed.config.engine_config import ServerConfig
from moed.config.errors import ConfigError


def bind_http(host: str, port: int, setting: str) -> socket.socket:
    """A taken port is known in the first second: raises `ConfigError`, which names `setting`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another with {setting} "
            "(0 takes any free one) or --host, or stop what uses it."
        ) from None


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    """`http://127.0.0.1:8000`"""
    host, port = listener.getsockname()[:2]
    scheme = "http" if server.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
