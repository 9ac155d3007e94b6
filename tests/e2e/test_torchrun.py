"""torchrun as the launcher: the same daemon, started and stopped by somebody else."""

import re
import signal

import httpx
import psutil
import pytest

from tests.daemon import Daemon, events, wait_gone
from tests.e2e.nodes import ranks_of, torchrun
from tests.e2e.streams import (
    KINDS,
    LONG,
    PROMPT,
    Stream,
    await_growth,
    await_status,
    finish,
    start_all,
)

TORCHRUN = torchrun("--standalone", "--nproc-per-node", "2")
RESTARTED = re.compile(r"ready again: all ranks serve in epoch (\d+)")


def test_serves_and_stops_under_torchrun() -> None:
    with Daemon(command=TORCHRUN) as daemon:
        daemon.wait_ready(90)
        daemon.assert_alive()
        prompt = list(range(40, 60))
        assert daemon.tokens(prompt, 8, 0) == daemon.tokens(prompt, 8, 1)
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        daemon.signal(signal.SIGTERM)
        daemon.wait_exit(30)
        wait_gone([child.pid for child in children], 10)


@pytest.mark.parametrize("is_first", [True, False])
def test_open_requests_are_told_of_a_killed_rank(is_first: bool) -> None:
    with Daemon(command=TORCHRUN) as daemon:
        daemon.wait_ready(90)
        first, other = ranks_of(daemon)
        stream = Stream(daemon, {"prompt": PROMPT, **LONG, "max_tokens": 1900})
        await_growth([stream], 4)
        (first if is_first else other).kill()
        stream.wait(30)
        assert isinstance(stream.error, dict) and stream.error["message"], stream.error
        assert daemon.wait_exit(30) != 0
        wait_gone([first.pid, daemon.pid("http")], 15)


@pytest.mark.parametrize("victim", [0, 1])
def test_open_requests_go_on_after_torchrun_has_started_all_ranks_again(victim: int) -> None:
    command = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with Daemon(command=command) as daemon:
        daemon.wait_ready(90)
        expected, http = start_all(daemon), daemon.pid("http")
        for stream in expected:
            stream.join()
        ranks = ranks_of(daemon)
        streams = start_all(daemon)
        await_growth(streams, 4)
        ranks[victim].kill()
        await_status(daemon, "recovering")
        late = Stream(daemon, KINDS["greedy"])
        finish([*streams, late], [*expected, expected[0]], 60)
        assert daemon.wait_log(RESTARTED).group(1) == "1"
        daemon.assert_at_rest()
        assert not {rank.pid for rank in ranks} & {rank.pid for rank in ranks_of(daemon)}
        # torchrun starts them no more.
        stream = Stream(daemon, {"prompt": PROMPT, **LONG, "max_tokens": 1900})
        await_growth([stream], 4)
        ranks_of(daemon)[victim].kill()
        stream.wait(30)
        assert isinstance(stream.error, dict) and stream.error["message"], stream.error
        assert daemon.wait_exit(30) != 0
        wait_gone([http], 15)


def test_a_restarted_group_stops_as_any_other() -> None:
    command = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    with Daemon(command=command) as daemon:
        daemon.wait_ready(90)
        http = daemon.pid("http")
        ranks_of(daemon)[1].kill()
        daemon.wait_log(RESTARTED)
        stream = Stream(daemon, {"prompt": PROMPT, **LONG, "max_tokens": 400})
        await_growth([stream], 4)
        pids = [http, *(rank.pid for rank in ranks_of(daemon))]
        daemon.signal(signal.SIGTERM)
        stream.join()
        daemon.wait_exit(30)
        wait_gone(pids, 10)


def test_nothing_outlives_torchrun() -> None:
    command = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    with Daemon(command=command) as daemon:
        daemon.wait_ready(90)
        pids = [daemon.pid("http"), *(rank.pid for rank in ranks_of(daemon))]
        stream = Stream(daemon, {"prompt": PROMPT, **LONG, "max_tokens": 1900})
        await_growth([stream], 4)
        daemon.process.kill()
        stream.wait(30)
        assert isinstance(stream.error, dict) and "torchrun has ended" in stream.error["message"]
        wait_gone(pids, 20)


def test_a_number_of_ranks_that_differs_from_torchruns_is_refused() -> None:
    with Daemon(command=TORCHRUN, ranks=3) as daemon:
        assert daemon.wait_exit(60) != 0
        assert "2 rank(s), and --data-parallel-size 3 x" in daemon.log


@pytest.mark.slow
def test_a_drain_ends_before_torchrun_kills() -> None:
    """The open request is told of the end, and every process leaves by itself."""
    command = torchrun("--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "8")
    with Daemon("--shutdown-timeout", "60", command=command) as daemon:
        daemon.wait_ready(90)
        assert "shutdown_timeout is 4 s and not 60 s: torchrun kills its workers 8 s" in daemon.log
        body = {"prompt": [65], "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16}
        url = f"{daemon.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            seen = events(response)
            next(seen)
            daemon.signal(signal.SIGTERM)
            assert "shutting down" in list(seen)[-1]["error"]["message"]
        daemon.wait_exit(30)
        assert "forcefully exiting" not in daemon.log
