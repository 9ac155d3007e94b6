"""Servers are replaced one after another behind clients that follow readiness: nothing is lost."""

import pathlib
import threading
import time
from typing import Any

from moed.server.messages import Drain, Drained, StopNow
from tests.rolling import BODY, DELAY_S, Balancer, Client
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

NUM_CLIENTS = 6


def test_no_request_is_lost_while_every_server_is_replaced(checkpoint: pathlib.Path) -> None:
    def server() -> Served:
        config = frontend_config(checkpoint, shutdown_timeout_s=8.0, drain_delay_s=DELAY_S)
        made = Served(config).__enter__()
        made.hear(), made.hear()
        for engine in made.engines:
            engine.step_s = 0.005
        return made

    stop, started = threading.Event(), [server(), server()]
    try:
        with Balancer() as balancer:
            balancer.urls = [each.url for each in started]
            balancer.wait_ready()
            clients = [Client(balancer, stop) for _ in range(NUM_CLIENTS)]
            for old in started[:2]:
                time.sleep(0.3)
                old.tell(Drain())
                # A new one comes where the old one goes, as in a Deployment.
                new = server()
                started.append(new)
                assert old.hear(10) == Drained(num_unfinished=0)
                old.tell(StopNow())
                old.wait_stopped()
                balancer.urls = [url for url in balancer.urls if url != old.url] + [new.url]
                balancer.wait_ready()
            time.sleep(0.3)
            stop.set()
            for client in clients:
                client.thread.join(20)
                assert not client.thread.is_alive()
    finally:
        for each in started:
            each.__exit__(None, None, None)
    assert [fault for client in clients for fault in client.faults] == []
    answered = {url for client in clients for url in client.answers}
    assert answered == {each.url for each in started}
    assert sum(n for client in clients for n in client.answers.values()) > 50


def test_readiness_is_red_before_requests_are_refused(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, shutdown_timeout_s=5.0, drain_delay_s=0.5)
    with Served(config) as own:
        own.hear(), own.hear()
        started = time.monotonic()
        own.tell(Drain())
        own.wait(lambda: own.get("/readyz").status_code == 503)
        assert own.get("/readyz").json()["status"] == "draining"
        assert own.get("/livez").status_code == 200
        late = own.post("/v1/completions", BODY)
        assert late.status_code == 200 and late.headers["connection"] == "close"
        assert own.hear(5) == Drained(num_unfinished=0)
        assert time.monotonic() - started >= 0.5
        refused = own.post("/v1/completions", BODY)
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        own.tell(StopNow())
        own.wait_stopped()


def test_the_delay_is_part_of_the_timeout(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, shutdown_timeout_s=0.8, drain_delay_s=0.5)
    with Served(config) as own:
        own.hear(), own.hear()
        for engine in own.engines:
            engine.step_s = 0.02
        answers: list[Any] = []
        body = {**BODY, "max_tokens": 400}
        reader = threading.Thread(
            target=lambda: answers.append(own.post("/v1/completions", body)), daemon=True
        )
        reader.start()
        own.wait(lambda: own.num_running == 1)
        started = time.monotonic()
        own.tell(Drain())
        assert own.hear(5) == Drained(num_unfinished=1)
        assert 0.75 < time.monotonic() - started < 2.5
        reader.join(5)
        assert "shutting down" in answers[0].json()["error"]["message"]


def test_a_drain_by_request_takes_nothing_after_sigterm_either(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, shutdown_timeout_s=5.0, drain_delay_s=0.5)
    with Served(config) as own:
        own.hear(), own.hear()
        assert own.http.post("/admin/drain").status_code == 200
        own.tell(Drain())
        assert own.hear(0.4) == Drained(num_unfinished=0)
        assert own.post("/v1/completions", BODY).status_code == 503
