"""torchrun as the launcher: the same daemon, started and stopped by somebody else."""

import signal
import sys

import httpx
import psutil
import pytest

from tests.daemon import Daemon, events, wait_gone
from tests.e2e.streams import LONG, PROMPT, Stream, await_growth

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "moed.server",
)


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
        agent, http = psutil.Process(daemon.process.pid), psutil.Process(daemon.pid("http"))
        first = http.parent()
        assert first is not None
        ranks = [c for c in agent.children() if "moed.server" in " ".join(c.cmdline())]
        stream = Stream(daemon, {"prompt": PROMPT, **LONG, "max_tokens": 1900})
        await_growth([stream], 4)
        next(rank for rank in ranks if (rank.pid == first.pid) is is_first).kill()
        stream.wait(30)
        assert isinstance(stream.error, dict) and stream.error["message"], stream.error
        assert daemon.wait_exit(30) != 0
        wait_gone([first.pid, http.pid], 15)


def test_a_number_of_ranks_that_differs_from_torchruns_is_refused() -> None:
    with Daemon(command=TORCHRUN, ranks=3) as daemon:
        assert daemon.wait_exit(60) != 0
        assert "2 rank(s), and --data-parallel-size 3 x" in daemon.log


@pytest.mark.slow
def test_a_drain_ends_before_torchrun_kills() -> None:
    """The open request is told of the end, and every process leaves by itself."""
    own = TORCHRUN.index("-m", 3)
    command = (*TORCHRUN[:own], "--shutdown-timeout", "8", *TORCHRUN[own:])
    with Daemon("--shutdown-timeout", "60", command=command) as daemon:
        daemon.wait_ready(90)
        assert "shutdown_timeout is 4 s and not 60 s: torchrun kills its workers 8 s" in daemon.log
        body = {"prompt": [65], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        url = f"{daemon.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            seen = events(response)
            next(seen)
            daemon.signal(signal.SIGTERM)
            assert "shutting down" in list(seen)[-1]["error"]["message"]
        daemon.wait_exit(30)
        assert "forcefully exiting" not in daemon.log
