"""Clients behind a balancer that follows readiness, for tests that replace servers under them.

The clients never try a request again, and readiness is asked for only every `PROBE_S`: a server
that refused at once what it is still sent would show.
"""

import itertools
import threading
import time
from typing import Any

import httpx

PROBE_S = 0.15
# Longer than a probe's interval and the answer to it.
DELAY_S = 0.6
BODY = {"prompt": "a", "max_tokens": 12, "ignore_eos": True}


class Balancer:
    """Round robin over the servers that were ready when last asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = itertools.count()
        self._ready: list[str] = []
        self._stopping = threading.Event()
        self.urls: list[str] = []
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def _probe(self) -> None:
        with httpx.Client(timeout=5) as http:
            while not self._stopping.wait(PROBE_S):
                ready = []
                for url in list(self.urls):
                    try:
                        if http.get(f"{url}/readyz").status_code == 200:
                            ready.append(url)
                    except httpx.TransportError:
                        pass
                with self._lock:
                    self._ready = ready

    def choose(self) -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with self._lock:
                if self._ready:
                    return self._ready[next(self._turn) % len(self._ready)]
            time.sleep(0.01)
        raise AssertionError("no server is ready")

    def wait_ready(self) -> None:
        """Until every server has been seen ready."""
        deadline = time.monotonic() + 10
        while True:
            with self._lock:
                if set(self.urls) == set(self._ready):
                    return
            assert time.monotonic() < deadline, "a server is not ready"
            time.sleep(0.01)

    def __enter__(self) -> "Balancer":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join(10)


class Client:
    """One request after another, on connections that are kept, until told to stop."""

    def __init__(self, balancer: Balancer, stop: threading.Event) -> None:
        self.answers: dict[str, int] = {}
        self.faults: list[Any] = []
        self._balancer, self._stop = balancer, stop
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=20) as http:
            while not self._stop.is_set():
                url = self._balancer.choose()
                try:
                    answer = http.post(f"{url}/v1/completions", json=BODY)
                    if answer.status_code != 200:
                        self.faults.append((url, answer.status_code, answer.text))
                        continue
                    assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
                    self.answers[url] = self.answers.get(url, 0) + 1
                except Exception as error:
                    self.faults.append((url, repr(error)))
