"""Daemons are replaced one after another, on their ports, by signals: no request is lost."""

import signal
import threading
import time

import pytest

from tests.daemon import Daemon
from tests.rolling import DELAY_S, Balancer, Client

NUM_CLIENTS = 4


@pytest.mark.slow
def test_no_request_is_lost_while_both_daemons_restart() -> None:
    stop = threading.Event()
    flags = ("--drain-delay", str(DELAY_S), "--shutdown-timeout", "20")
    with Balancer() as balancer:
        daemons = [Daemon(*flags, ranks=1).__enter__() for _ in range(2)]
        try:
            balancer.urls = [daemon.wait_ready().url for daemon in daemons]
            balancer.wait_ready()
            clients = [Client(balancer, stop) for _ in range(NUM_CLIENTS)]
            for old in list(daemons):
                time.sleep(0.5)
                old.signal(signal.SIGTERM)
                assert old.wait_exit(20) == 0
                # The same address, as with a systemd unit on each of two machines.
                port = old.url.rsplit(":", 1)[1]
                daemons.append(Daemon(*flags, "--port", port, ranks=1).__enter__())
                daemons[-1].wait_ready()
                balancer.wait_ready()
            time.sleep(0.5)
            stop.set()
            for client in clients:
                client.thread.join(30)
                assert not client.thread.is_alive()
            assert [fault for client in clients for fault in client.faults] == []
            answered = {url for client in clients for url in client.answers}
            assert answered == set(balancer.urls)
            assert sum(n for client in clients for n in client.answers.values()) > 50
        finally:
            stop.set()
            for daemon in daemons:
                daemon.__exit__(None, None, None)
