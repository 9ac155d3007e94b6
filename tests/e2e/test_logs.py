"""What a daemon writes: lines for machines when asked, and every ten seconds one for people."""

import json
import re
import time

import pytest

from tests.daemon import Daemon

STATUS = re.compile(
    r"\d+ running, \d+ waiting; [\d.,]+ prompt and [\d.,]+ output tokens/s; KV cache \d+% used"
)


def test_every_line_is_an_object_when_asked() -> None:
    with Daemon("--log-format", "json", "--log-requests", "--log-level", "debug") as daemon:
        daemon.wait_ready()
        daemon.complete([65], 2)
        assert daemon.post("/v1/completions", {"prompt": [-1]}).status_code == 400
        daemon.process.terminate()
        assert daemon.wait_exit(30) == 0
    lines = [json.loads(line) for line in daemon.lines]
    told = [line for line in lines if line.get("event") != "request"]
    (request,) = [line for line in lines if line.get("event") == "request"]
    assert request["completion_tokens"] == 2
    assert {line["process"] for line in told} >= {"launcher", "http", "rank 0", "rank 1"}
    assert all(line["message"] and line["time"] and line["level"] for line in told)


@pytest.mark.slow
def test_a_busy_daemon_tells_its_status_every_ten_seconds() -> None:
    with Daemon(ranks=1) as daemon:
        daemon.wait_ready()
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline and len(STATUS.findall(daemon.log)) < 2:
            daemon.complete([65], 200)
        assert len(STATUS.findall(daemon.log)) == 2
        time.sleep(21)
        # The requests after the second line are told once more, and then there is silence.
        assert len(STATUS.findall(daemon.log)) <= 3
