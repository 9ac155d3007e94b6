"""A `moed serve` process for a test: started, watched, asked, and always ended, by process id."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import psutil

ROOT = pathlib.Path(__file__).parent.parent
START_S = 60.0
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
STARTED = re.compile(r"started (http|rank-\d+): process (\d+)")


def clean_environment() -> dict[str, str]:
    """This process's environment without what would configure a daemon by accident."""
    dropped = ("MOED_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_")
    return {key: value for key, value in os.environ.items() if not key.startswith(dropped)}


def free_port() -> int:
    """On the loopback; nobody had it a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Daemon:
    """Use as a context; `wait_ready` before asking. Every wait is bounded."""

    def __init__(
        self,
        *arguments: str,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        launcher = command or (sys.executable, "-m", "moed.server")
        self.process = subprocess.Popen(
            [*launcher, "serve", "-dp", str(ranks), "--port", "0", *arguments],
            env={**clean_environment(), **(environment or {})},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.ranks = ranks
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_log(self, pattern: re.Pattern[str], timeout_s: float = START_S) -> re.Match[str]:
        """The first match in the log; fails when the daemon ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (match := pattern.search(self.log)) is not None:
                return match
            if self.process.poll() is not None:
                self._reader.join(5)
                if (match := pattern.search(self.log)) is not None:
                    return match
                break
            time.sleep(0.02)
        raise AssertionError(f"{pattern.pattern!r} not in the log:\n{self.log}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.wait_log(LISTENING).group(1)}"

    def pid(self, name: str) -> int:
        """Process id of `http` or `rank-N`."""
        self.wait_log(re.compile(f"started {name}: process"))
        return int({found[0]: found[1] for found in STARTED.findall(self.log)}[name])

    def rank_pids(self) -> list[int]:
        """Process ids of its ranks now, in order."""
        found = {name: int(pid) for name, pid in STARTED.findall(self.log) if name != "http"}
        return [found[name] for name in sorted(found, key=lambda name: int(name[5:]))]

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        deadline = time.monotonic() + timeout_s
        url = self.url
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready:\n{self.log}")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options
        )

    def post(self, path: str, body: Any, rank: int | None = None, **options: Any) -> httpx.Response:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return httpx.post(self.url + path, json=body, headers=headers, **{"timeout": 60, **options})

    def complete(self, prompt: Any, max_tokens: int, rank: int | None = None, **body: Any) -> Any:
        """One greedy completion, forced to `max_tokens`; returns the parsed body."""
        request = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        }
        response = self.post("/v1/completions", request, rank)
        assert response.status_code == 200, response.text
        return response.json()

    def tokens(self, prompt: Any, max_tokens: int, rank: int | None = None) -> list[int]:
        """Greedy token ids of one completion."""
        ids: list[int] = self.complete(prompt, max_tokens, rank)["choices"][0]["token_ids"]
        return ids

    def metrics(self) -> dict[tuple[str, int], float]:
        """`moed:` samples of /metrics that carry an engine label: (name, rank) → value."""
        found: dict[tuple[str, int], float] = {}
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        for name, labels, value in re.findall(r"^(moed:\w+)\{(.*?)\} (\S+)$", text, re.M):
            if (engine := re.search(r'engine="(\d+)"', labels)) is not None:
                found[name, int(engine.group(1))] = float(value)
        return found

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample `name` of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", text, re.M)
        return [
            (dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value)) for labels, value in found
        ]

    def rank_tokens(self, rank: int) -> float:
        """Rows that the experts of process `rank` have computed, by its last report."""
        samples = self.series("moed:rank_tokens_total")
        return sum(value for labels, value in samples if labels["ep_rank"] == str(rank))

    def assert_alive(self) -> None:
        """A request of one token on every rank answers within 5 s, and the gauges return to 0."""
        for rank in range(self.ranks):
            body = {"prompt": [65], "max_tokens": 1}
            answer = self.post("/v1/completions", body, rank, timeout=5)
            assert answer.status_code == 200, answer.text
        self.assert_at_rest()

    def assert_at_rest(self, timeout_s: float = 5.0) -> None:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + timeout_s
        while True:
            samples = self.metrics()
            busy = {
                (name, rank): samples[f"moed:{name}", rank]
                for name in gauges
                for rank in range(self.ranks)
                if samples[f"moed:{name}", rank] != 0
            }
            if not busy:
                return
            assert time.monotonic() < deadline, f"not at rest: {busy}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None
        self._reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        own = psutil.Process().children(recursive=True)
        descendants = [child for child in own if self.process.pid in _ancestors(child)]
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for child in descendants:
            if child.is_running() and child.pid != self.process.pid:
                child.kill()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()


def _ancestors(process: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def is_gone(pid: int) -> bool:
    """True when no such process runs any more (a zombie counts as gone)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: Sequence[int], timeout_s: float) -> None:
    """Fails when any of the processes still runs after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if not is_gone(pid)]
        time.sleep(0.02)


def events(response: httpx.Response) -> Iterator[Any]:
    """The JSON payloads of a stream of server-sent events, `[DONE]` as that string."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            payload = line.removeprefix("data: ")
            yield payload if payload == "[DONE]" else json.loads(payload)
