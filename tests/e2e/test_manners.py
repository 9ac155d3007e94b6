"""How the processes start, fail and stop, seen from outside."""

import contextlib
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon, events, wait_gone


def stream(daemon: Daemon, max_tokens: int, rank: int, **body: Any) -> Iterator[Any]:
    """Events of a streamed completion that would go on for long."""
    request = {
        "prompt": [65, 66, 67],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        **body,
    }
    headers = {"X-data-parallel-rank": str(rank)}
    url = f"{daemon.url}/v1/completions"
    with httpx.stream("POST", url, json=request, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        yield from events(response)


def port_is_free(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


def all_pids(daemon: Daemon) -> list[int]:
    ranks = [daemon.pid(f"rank-{rank}") for rank in range(daemon.ranks)]
    return [daemon.process.pid, daemon.pid("http"), *ranks]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_everything_where_that_is_asked_for(victim: int) -> None:
    with Daemon("--on-rank-failure", "exit") as daemon:
        daemon.wait_ready()
        url, pids = daemon.url, all_pids(daemon)
        outcomes: dict[int, list[Any]] = {0: [], 1: []}

        def read(rank: int) -> None:
            outcomes[rank].extend(stream(daemon, 1900, rank))

        readers = [threading.Thread(target=read, args=(rank,)) for rank in (0, 1)]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + 20
        while not all(len(outcome) > 3 for outcome in outcomes.values()):
            assert time.monotonic() < deadline, "the streams did not start"
            time.sleep(0.01)
        with watched_readiness(url) as statuses:
            psutil.Process(daemon.pid(f"rank-{victim}")).kill()
            daemon.process.wait(15)
        assert "failed" in statuses
        for reader in readers:
            reader.join(10)
            assert not reader.is_alive(), "a client waited more than 10 s"
        for outcome in outcomes.values():
            assert outcome[-1]["error"]["type"] == "server_error", outcome[-1]
            assert f"rank {victim}" in outcome[-1]["error"]["message"]
            assert not any(choice["finish_reason"] for e in outcome[:-1] for choice in e["choices"])
        assert daemon.wait_exit(10) == 70
        assert f"rank {victim} ended without a word: killed by SIGKILL" in daemon.lines[-1]
        wait_gone(pids, 5)
        assert port_is_free(url)


@contextlib.contextmanager
def watched_readiness(url: str) -> Iterator[set[str]]:
    """All that the daemon says of its readiness meanwhile."""
    found: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=5) as http, contextlib.suppress(httpx.TransportError):
            while not over.is_set():
                found.add(http.get(f"{url}/readyz").json()["status"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(10)


def test_killed_launcher_takes_its_children_and_a_restart_works(tmp_path: pathlib.Path) -> None:
    temporary = {"TMPDIR": str(tmp_path)}
    with Daemon(environment=temporary) as daemon:
        daemon.wait_ready()
        # So that the process which tries grammars is there too.
        regex = {"prompt": [65], "max_tokens": 4, "structured_outputs": {"regex": "[ab]+"}}
        assert daemon.post("/v1/completions", regex).status_code == 200
        everyone = psutil.Process(daemon.process.pid).children(recursive=True)
        pids = [daemon.process.pid, *(process.pid for process in everyone)]
        assert set(all_pids(daemon)) < set(pids)
        # What lies in shared memory has no name, and goes with them.
        shared = [line for pid in pids for line in maps_of(pid) if "/dev/shm/" in line]
        assert shared and all(line.endswith("(deleted)") for line in shared)
        daemon.process.kill()
        wait_gone(pids, 5)
        url = daemon.url
    (left,) = tmp_path.iterdir()
    port = url.rsplit(":", 1)[1]
    with Daemon("--port", port, environment=temporary) as daemon:
        daemon.wait_ready()
        assert daemon.url == url
        daemon.assert_alive()
        assert left not in tmp_path.iterdir()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(15) == 0
    assert not list(tmp_path.iterdir())


def maps_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_sigterm_lets_open_requests_finish_and_refuses_new_ones() -> None:
    with Daemon("--shutdown-timeout", "30") as daemon:
        daemon.wait_ready()
        url, pids = daemon.url, all_pids(daemon)
        running = stream(daemon, 600, 0)
        next(running)
        daemon.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/readyz").status_code != 503:
            assert time.monotonic() < deadline
        assert httpx.get(f"{url}/livez").status_code == 200
        refused = daemon.post("/v1/completions", {"prompt": [65], "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close" and "retry-after" in refused.headers
        rest = list(running)
        assert rest[-1] == "[DONE]"
        finishes = [c["finish_reason"] for e in rest[:-1] for c in e["choices"]]
        assert finishes[-1] == "length"
        assert daemon.wait_exit(10) == 0
        wait_gone(pids, 5)
        assert port_is_free(url)


def test_drain_that_takes_too_long_ends_with_an_error_event() -> None:
    with Daemon("--shutdown-timeout", "1") as daemon:
        daemon.wait_ready()
        running = stream(daemon, 2000, 1)
        next(running)
        daemon.signal(signal.SIGTERM)
        assert "error" in list(running)[-1]
        assert daemon.wait_exit(10) == 0


def test_second_signal_stops_at_once() -> None:
    with Daemon("--shutdown-timeout", "60") as daemon:
        daemon.wait_ready()
        pids = all_pids(daemon)
        running = stream(daemon, 2000, 1)
        next(running)
        daemon.signal(signal.SIGTERM)
        time.sleep(0.5)
        daemon.signal(signal.SIGTERM)
        assert "error" in list(running)[-1]
        assert daemon.wait_exit(8) == 128 + signal.SIGTERM
        wait_gone(pids, 5)


def test_leaked_launch_variables_change_nothing() -> None:
    leaked = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.255.255.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "somebody-else",
        "MOED_SERVICE_HOST": "10.0.0.9",
        "MOED_PORT": "tcp://10.0.0.9:8000",
        "MOED_PORT_8000_TCP_ADDR": "10.0.0.9",
    }
    with Daemon(environment=leaked) as daemon:
        daemon.wait_ready()
        daemon.assert_alive()


def test_three_daemons_started_together() -> None:
    with Daemon() as one, Daemon() as two, Daemon() as three:
        for daemon in (one, two, three):
            daemon.wait_ready(90)
        for daemon in (one, two, three):
            daemon.assert_alive()


def test_taken_port_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Daemon("--port", str(port)) as daemon:
            assert daemon.wait_exit(10) == 78
            assert str(port) in daemon.lines[-1] and "--port" in daemon.lines[-1]
            assert "Traceback" not in daemon.log


def test_rank_that_fails_to_load_is_reported_last() -> None:
    with Daemon(environment={"MOED_FAULT_INJECTION": "fail_load:rank=1"}) as daemon:
        code = daemon.wait_exit(60)
        assert code not in (0, None)
        assert "rank 1" in daemon.lines[-1] and "fail_load" in daemon.lines[-1]


def test_rank_that_raises_in_a_step_is_named_with_its_own_error() -> None:
    fault = {"MOED_FAULT_INJECTION": "raise:rank=1:step=30"}
    with Daemon("--on-rank-failure", "exit", environment=fault) as daemon:
        daemon.wait_ready()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            daemon.client().completions.create(
                model="moed-demo", prompt=[65], max_tokens=500, extra_body={"ignore_eos": True}
            )
        assert daemon.wait_exit(15) == 70
        assert "rank 1" in daemon.lines[-1] and "injected" in daemon.lines[-1]


@pytest.mark.slow
def test_not_ready_when_the_first_real_step_fails_on_any_rank() -> None:
    fault = {"MOED_FAULT_INJECTION": "raise:rank=1:step=0"}
    with Daemon(environment=fault) as daemon:
        with watched_readiness(daemon.url) as statuses:
            assert daemon.wait_exit(60) != 0
        assert "starting" in statuses and "ready" not in statuses
        assert "rank 1" in daemon.lines[-1] and "injected" in daemon.lines[-1]


def test_unequal_kv_block_counts_become_the_minimum() -> None:
    blocks = {"MOED_FAULT_INJECTION": "kv_blocks:rank=1:blocks=48"}
    with Daemon("--num-kv-blocks", "64", environment=blocks) as daemon:
        daemon.wait_ready()
        daemon.assert_alive()
        text = httpx.get(f"{daemon.url}/metrics").text
        assert re.search(r'moed:cache_config_info\{.*num_gpu_blocks="48"', text)


def test_not_ready_before_the_ranks_are() -> None:
    with Daemon() as daemon:
        url = daemon.url
        assert httpx.get(f"{url}/livez").status_code == 200
        early = httpx.get(f"{url}/readyz")
        assert early.status_code == 503
        refused = daemon.post("/v1/completions", {"prompt": [65], "max_tokens": 1})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        daemon.wait_ready()
        assert httpx.get(f"{url}/startupz").status_code == 200


def test_stop_while_starting() -> None:
    with Daemon() as daemon:
        pids = all_pids(daemon)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit(15) == 0
        wait_gone(pids, 5)


def test_idle_daemon_sleeps(served: Daemon) -> None:
    """Ranks wait without waking; what is left is the front end's clock and gloo's own thread,
    which looks at its sockets every 10 ms.
    """
    served.assert_at_rest()
    processes = [psutil.Process(pid) for pid in all_pids(served)]

    def wakes_of_main_threads() -> list[int]:
        status = [Path(f"/proc/{p.pid}/task/{p.pid}/status").read_text() for p in processes]
        return [int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", s, re.M)[0]) for s in status]

    def used_s() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    def is_still() -> bool:
        wakes, used = wakes_of_main_threads(), used_s()
        time.sleep(5)
        launcher, http, *ranks = (
            after - before for before, after in zip(wakes, wakes_of_main_threads(), strict=True)
        )
        # The front end: once a second, for the Date header of answers. A loaded machine makes each
        # of gloo's looks dearer; polling would cost seconds.
        return launcher == 0 and max(ranks) == 0 and http <= 15 and used_s() - used < 0.15

    # The way to sleep takes a while on a loaded machine; who polls is never still.
    assert any(is_still() for _ in range(3))


def test_python_dash_m_and_version() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "moed.server", "version"], capture_output=True, text=True, timeout=30
    )
    assert shown.returncode == 0 and shown.stdout.startswith("moed ")


@pytest.mark.parametrize(
    "streams",
    ["0<&- 1>&- 2>&-", pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.slow)],
)
def test_standard_streams_that_are_closed_or_on_a_full_disk(streams: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = f"exec {sys.executable} -m moed.server serve --port {port} --log-requests {streams}"
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(["sh", "-c", command])
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                    break
            time.sleep(0.2)
        assert process.poll() is None
        for prompt, status in (([65], 200), ([-1], 400)):
            body = {"prompt": prompt, "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
            assert answer.status_code == status
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)


def test_a_front_end_that_cannot_load_says_why_last(tmp_path: pathlib.Path) -> None:
    for file in bundled_checkpoint().iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with Daemon(str(tmp_path)) as daemon:
        assert daemon.wait_exit(20) == 65
        assert "tokenizer.json" in daemon.lines[-1] and "Traceback" not in daemon.log
