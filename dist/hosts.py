"""Which host this process is on, and which of its networks leads to another. Imports no torch."""

import platform
import socket
from pathlib import Path

import psutil

from moed.config.errors import ConfigError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


def host_identity() -> str:
    """Equal for processes that can share memory and loopback, different for all others.

    A container with a network or processes of its own counts as a host of its own.
    """
    try:
        spaces = [(NAMESPACES / name).readlink().name for name in ("net", "pid")]
        return " ".join([BOOT_ID.read_text().strip(), *spaces])
    except OSError:
        return platform.node()


def route_to(host: str, port: int) -> str | None:
    """The own address from which `host` is reached; None where there is no way or no such host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                # Of a datagram socket: sends nothing.
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`."""
    for name, entries in psutil.net_if_addrs().items():
        # A link-local address carries its interface: fe80::1%eth0.
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def address_on(interface: str) -> str:
    """The address of the network interface. Raises `ConfigError` where it has none."""
    interfaces = psutil.net_if_addrs()
    entries = interfaces.get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return entry.address
    known = ", ".join(sorted(interfaces))
    raise ConfigError(
        f"host_interface is {interface!r}, which is not a network interface with an address here; "
        f"there are {known}"
    )


def loopback_name() -> str:
    """The interface of 127.0.0.1: `lo` on Linux, `lo0` on macOS."""
    return interface_of("127.0.0.1") or "lo"


def own_address(interface: str | None, host: str, port: int) -> str:
    """The address for sockets that other nodes connect to: on `interface`, or by the route to
    `host`, the first node. Raises `ConfigError` where there is none.
    """
    if interface is not None:
        return address_on(interface)
    address = route_to(host, port)
    if address is None:
        raise ConfigError(
            f"no network leads to the first node, {host}: check its address (--master-addr), or "
            "name a network with --host-interface"
        )
    return address
