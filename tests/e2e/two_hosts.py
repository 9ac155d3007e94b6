"""Two hosts on one machine: network namespaces with names of their own, joined by one cable."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

CLONE_NEWNET = 0x40000000
HOSTS = pathlib.Path("/etc/netns")


class Host:
    """One of them."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.interface = f"{name}-e"

    def command(self, *arguments: str) -> list[str]:
        """The command line of `python arguments…` there, with the host's own name."""
        script = f'hostname {self.name} && exec "$@"'
        entering = ["ip", "netns", "exec", self.name, "unshare", "--uts"]
        return [*entering, "sh", "-c", script, "sh", sys.executable, *arguments]

    def call(self, function: Callable[[], Any]) -> Any:
        """`function()`, with what it connects to being looked for from there."""
        results: list[Any] = []

        def work() -> None:
            try:
                enter = ctypes.CDLL(None, use_errno=True).setns
                with open(f"/run/netns/{self.name}") as namespace:
                    assert enter(namespace.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
                results.append((True, function()))
            except BaseException as error:
                results.append((False, error))

        # A namespace belongs to a thread; this one ends with it.
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(120)
        assert results, "no answer within 120 s"
        is_good, value = results[0]
        if not is_good:
            raise value
        return value


class TwoHosts:
    """Use as a context. Skips the test where namespaces may not be made."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.first = Host(f"moed{mark}a", "10.77.0.1")
        self.second = Host(f"moed{mark}b", "10.77.0.2")

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.first, self.second

    def __enter__(self) -> "TwoHosts":
        if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
            pytest.skip("network namespaces need Linux, root and iproute2")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            pytest.skip(f"network namespaces may not be made here: {error.stderr.strip()}")
        return self

    def _make(self) -> None:
        first, second = self.hosts
        lines = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            _ip("netns", "add", host.name)
            # `ip netns exec` puts this in the place of /etc/hosts.
            folder = HOSTS / host.name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        ends = ["type", "veth", "peer", "name", second.interface, "netns", second.name]
        _ip("link", "add", first.interface, "netns", first.name, *ends)
        for host in self.hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", interface, "up")

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.second.name, "link", "set", self.second.interface, "down")

    def mend(self) -> None:
        """Put it in again."""
        _ip("-n", self.second.name, "link", "set", self.second.interface, "up")

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            command = ["ip", "netns", "delete", host.name]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
            shutil.rmtree(HOSTS / host.name, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=True)
