"""Two hosts, as network namespaces: they serve, lose the cable for a while, and lose each other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.daemon import Daemon, events
from tests.e2e.nodes import kill_all, probe
from tests.e2e.two_hosts import TwoHosts

PROMPT = list(range(40, 60))
LONG = {"prompt": [65], "max_tokens": 1000, "ignore_eos": True, "stream": True}
HELD_S = 15

pytestmark = pytest.mark.slow


@contextmanager
def serving() -> Iterator[tuple[TwoHosts, Daemon, Daemon]]:
    """The hosts, and the daemon of each, ready."""
    with TwoHosts() as hosts:
        words = ["--nnodes", "2", "--master-addr", hosts.first.address, "--probe-port", "0"]
        words += ["--recovery-timeout", str(HELD_S)]
        commands = [host.command("-m", "moed.server") for host in hosts.hosts]
        with (
            Daemon(*words, command=commands[0]) as first,
            Daemon(*words, "--node-rank", "1", command=commands[1]) as second,
        ):
            hosts.first.call(lambda: first.wait_ready(90))
            yield hosts, first, second


def wait_red(hosts: TwoHosts, first: Daemon, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while hosts.first.call(lambda: httpx.get(f"{first.url}/readyz", timeout=5)).status_code == 200:
        assert time.monotonic() < deadline, first.log
        time.sleep(0.2)


def test_serve_and_lose_a_host() -> None:
    with serving() as (hosts, first, second):
        tokens = hosts.first.call(lambda: [first.tokens(PROMPT, 8, rank) for rank in (0, 1)])
        assert tokens[0] == tokens[1]
        assert hosts.second.call(lambda: probe(second)).json()["status"] == "ready"

        def lose() -> str:
            url = f"{first.url}/v1/completions"
            with httpx.stream("POST", url, json=LONG, timeout=90) as response:
                seen = events(response)
                next(seen)
                kill_all(second)
                return str(list(seen)[-1])

        assert "error" in hosts.first.call(lose)
        assert first.wait_exit(30) != 0


def test_a_cut_cable() -> None:
    with serving() as (hosts, first, second):

        def cut() -> str:
            url = f"{first.url}/v1/completions"
            with httpx.stream("POST", url, json=LONG, timeout=90) as response:
                seen = events(response)
                next(seen)
                hosts.cut()
                wait_red(hosts, first, 10)
                since = time.monotonic()
                last = list(seen)[-1]
                assert time.monotonic() - since > HELD_S / 3
                return str(last)

        assert "silent" in hosts.first.call(cut)
        assert first.wait_exit(40) != 0 and second.wait_exit(40) != 0
