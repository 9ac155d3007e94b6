"""Starting, draining, losing a rank, stopping: what clients, probes and the launcher see."""

import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moed.server.messages import Drain, Drained, GroupReady, RankLost, Serving, StopNow
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 500}


@pytest.fixture
def own(checkpoint: pathlib.Path) -> Iterator[Served]:
    """A front end of the test's own, whose engines take 10 ms a step."""
    with Served(frontend_config(checkpoint)) as served:
        assert isinstance(served.hear(), Serving)
        assert isinstance(served.hear(), GroupReady)
        for engine in served.engines:
            engine.step_s = 0.01
        yield served


class Reader:
    """Reads a stream in a thread."""

    def __init__(self, served: Served, **body: Any) -> None:
        self.events: list[Any] = []
        self._thread = threading.Thread(target=self._read, args=(served, body))
        self._thread.start()

    def _read(self, served: Served, body: dict[str, Any]) -> None:
        self.events.extend(served.events(COMPLETIONS, **{**LONG, **body}))

    def result(self, timeout_s: float = 5.0) -> list[Any]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream did not end"
        return self.events


def test_answers_before_it_is_ready(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint), ready=False) as served:
        assert isinstance(served.hear(), Serving)
        assert served.get("/livez").status_code == 200
        served.wait(lambda: served.get("/readyz").text.count('"phase":"loading the model"') == 2)
        for path in ("/readyz", "/ready", "/health", "/ping", "/startupz"):
            response = served.get(path)
            assert response.status_code == 503 and "retry-after" in response.headers
            body = response.json()
            assert body["status"] == "starting"
            assert "rank 0: loading the model" in body["reason"]
            assert [rank["up"] for rank in body["ranks"]] == [False, False]
        assert served.get("/metrics").status_code == 200
        assert served.get("/version").json()["python"]
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize")):
            refused = served.http.request(method, path, json={"prompt": "a"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "server_starting"
            assert refused.json()["error"]["type"] == "overloaded_error"
        served.engines[0].become_ready()
        served.wait(lambda: served.get("/readyz").json()["ranks"][0]["up"])
        assert served.get("/readyz").status_code == 503
        served.engines[1].become_ready()
        served.wait(lambda: served.get("/readyz").status_code == 200)
        assert served.get("/startupz").status_code == 200
        assert served.hear() == GroupReady(num_kv_blocks=64, max_model_len=512)
        assert served.complete(prompt="a", max_tokens=1)["choices"]


def test_lost_rank_ends_every_request_with_an_error_at_once(own: Served) -> None:
    streams = [Reader(own), Reader(own, n=2)]
    whole: list[Any] = []
    waiter = threading.Thread(target=lambda: whole.append(own.post(COMPLETIONS, LONG)))
    waiter.start()
    own.wait(lambda: own.num_running == 4 and all(len(s.events) > 2 for s in streams))
    start = time.monotonic()
    own.tell(RankLost(rank=1, error="rank 1 ended without a word: killed by SIGKILL"))
    for stream in streams:
        events = stream.result(1.0)
        error = events[-1]["error"]
        assert error["type"] == "server_error" and "rank 1" in error["message"]
        assert sorted(error) == ["code", "message", "param", "type"]
        finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
        assert not any(finishes) and "[DONE]" not in events
    waiter.join(1)
    assert whole[0].status_code == 500 and "rank 1" in whole[0].json()["error"]["message"]
    assert whole[0].headers["x-should-retry"] == "false"
    assert time.monotonic() - start < 1
    assert own.hear() == Drained(num_unfinished=3)
    ready = own.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["status"] == "failed" and "rank 1" in ready.json()["reason"]
    assert [rank["up"] for rank in ready.json()["ranks"]] == [True, False]
    assert own.get("/livez").status_code == 200
    refused = own.post(COMPLETIONS, {"prompt": "a"})
    assert refused.status_code == 503 and "retry-after" in refused.headers


def test_openai_client_raises_on_an_error_in_the_stream(own: Served) -> None:
    with own.client() as client:
        stream = client.completions.create(model="tiny", stream=True, **LONG)
        next(stream)
        own.tell(RankLost(rank=0, error="rank 0 failed: out of memory"))
        with pytest.raises(openai.APIError, match="out of memory"):
            for _ in stream:
                pass


def test_drain_lets_open_requests_finish_and_refuses_new_ones(own: Served) -> None:
    stream = Reader(own, max_tokens=60)
    own.wait(lambda: len(stream.events) > 2)
    own.tell(Drain())
    own.wait(lambda: own.get("/readyz").status_code == 503)
    assert own.get("/readyz").json()["status"] == "draining"
    assert own.get("/livez").status_code == own.get("/startupz").status_code == 200
    refused = own.post(COMPLETIONS, {"prompt": "a"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "server_draining"
    assert not any(engine.was_shut_down.is_set() for engine in own.engines)
    events = stream.result()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert own.hear() == Drained(num_unfinished=0)
    for engine in own.engines:
        assert engine.was_shut_down.wait(2)
        # The shutdown comes first, and then the wake that makes a sleeping rank see it.
        assert engine.log.index("Shutdown") < len(engine.log) - 1 - engine.log[::-1].index("Wake")
    own.tell(StopNow())
    own.wait_stopped()


def test_drain_without_requests_is_immediate(own: Served) -> None:
    own.tell(Drain())
    assert own.hear(1.0) == Drained(num_unfinished=0)


def test_drain_that_takes_too_long_ends_with_an_error(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint, shutdown_timeout_s=0.3)) as own:
        own.hear(), own.hear()
        for engine in own.engines:
            engine.step_s = 0.01
        stream = Reader(own)
        own.wait(lambda: len(stream.events) > 2)
        own.tell(Drain())
        assert own.hear(2.0) == Drained(num_unfinished=1)
        events = stream.result(1.0)
        assert "shutting down" in events[-1]["error"]["message"]
        assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])


def test_stop_now_ends_a_drain(own: Served) -> None:
    stream = Reader(own)
    own.wait(lambda: len(stream.events) > 2)
    own.tell(Drain())
    time.sleep(0.1)
    own.tell(StopNow())
    assert "error" in stream.result(1.0)[-1]
    own.wait_stopped()
    assert all(engine.was_shut_down.wait(2) for engine in own.engines)


def test_rank_lost_while_draining(own: Served) -> None:
    stream = Reader(own)
    own.wait(lambda: len(stream.events) > 2)
    own.tell(Drain())
    own.tell(RankLost(rank=0, error="rank 0 failed"))
    assert "rank 0 failed" in stream.result(1.0)[-1]["error"]["message"]
    assert own.get("/readyz").json()["status"] == "failed"


def test_front_end_leaves_when_the_launcher_is_gone(own: Served) -> None:
    stream = Reader(own)
    own.wait(lambda: len(stream.events) > 2)
    own.pipe.close()
    assert "error" in stream.result(2.0)[-1]
    own.wait_stopped()


def test_stop_while_starting(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint), ready=False) as served:
        assert isinstance(served.hear(), Serving)
        served.tell(Drain())
        assert served.hear() == Drained(num_unfinished=0)
        served.tell(StopNow())
        served.wait_stopped()


def test_queue_full_is_503_with_a_time_to_wait(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, max_num_seqs=1, max_num_queued_requests=2)
    with Served(config) as own:
        for engine in own.engines:
            engine.step_s = 0.05
        streams = [Reader(own, max_tokens=40) for _ in range(4)]
        own.wait(lambda: own.num_running == 4)
        refused = own.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "overloaded_error"
        own.pipe.close()
        for stream in streams:
            stream.result()
        own.wait_stopped()
