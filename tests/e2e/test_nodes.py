"""Several nodes on this machine's loopback: they serve as one, stop as one, and fail as one."""

import re
import signal
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.daemon import Daemon, events, free_port, wait_gone
from tests.e2e.nodes import Nodes, await_probe, kill_all, probe, ranks_of, torchrun
from tests.e2e.streams import await_growth, finish, start_all

PROMPT = list(range(40, 60))
LONG = {"prompt": [65], "max_tokens": 1000, "ignore_eos": True, "stream": True}


def test_two_nodes_serve_and_stop_together() -> None:
    with Nodes() as nodes:
        first, second = nodes.daemons
        assert probe(second, "/livez").status_code == 200
        first.wait_ready(90)
        first.assert_alive()
        tokens = first.tokens(PROMPT, 8, 0)
        assert first.tokens(PROMPT, 8, 1) == tokens
        # It hears from the first node that all are ready.
        await_probe(second, 200)
        assert probe(second).json() == {"status": "ready", "reason": None, "node": 1, "ranks": [1]}
        assert "rank-0" in first.log and "rank-1:" not in first.log
        sent = {"intra": 0.0, "inter": 0.0}
        for labels, num_bytes in first.series("moed:all2all_bytes_total"):
            sent[labels["scope"]] += num_bytes
        # Both nodes are on this host, where rows go through memory.
        assert sent["intra"] > 0 == sent["inter"]
        # A signal to any node drains and stops all of them.
        url, body = f"{first.url}/v1/completions", {**LONG, "max_tokens": 60}
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            seen = events(response)
            next(seen)
            second.signal(signal.SIGTERM)
            assert list(seen)[-1] == "[DONE]"
        assert [daemon.wait_exit(30) for daemon in nodes.daemons] == [0, 0], nodes.logs
    with Daemon(ranks=1) as alone:
        assert alone.wait_ready().tokens(PROMPT, 8) == tokens


def test_a_node_that_ends_takes_the_others_along() -> None:
    with Nodes("--recovery-timeout", "4") as nodes:
        first, second = nodes.daemons
        first.wait_ready(90)
        with httpx.stream("POST", f"{first.url}/v1/completions", json=LONG, timeout=60) as response:
            seen = events(response)
            next(seen)
            kill_all(second)
            assert "error" in list(seen)[-1]
        assert first.wait_exit(30) != 0
        assert "Traceback" not in first.log, first.log


@pytest.mark.slow
def test_the_first_node_gone_ends_the_others() -> None:
    with Nodes("--recovery-timeout", "8") as nodes:
        first, second = nodes.daemons
        first.wait_ready(90)
        kill_all(first)
        assert second.wait_exit(60) != 0
        assert "Traceback" not in second.log, second.log


@pytest.mark.slow
def test_a_waiting_node_says_who_is_missing() -> None:
    nodes = Nodes("--rendezvous-timeout", "14", own=((), (), ()))
    with ExitStack() as stack:
        stack.push(nodes)
        for number in range(2):
            nodes.start(number)
        for daemon in nodes.daemons:
            daemon.wait_log(re.compile(r"waiting for rank 2 \(node 2\) \(1\d s so far\)"), 40)
        for text in nodes.refusals(30):
            assert "rank 2 (node 2) did not come within 14 s" in text, text


def torchrun_nodes(stack: ExitStack, *own: str, is_static: bool = False) -> list[Daemon]:
    """Two agents that meet on one port, and a rank of each. `own`: torchrun's words; `is_static`:
    each node has its number, as where c10d is not wanted.
    """
    port = str(free_port())
    c10d = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
    static = ("--master-addr", "127.0.0.1", "--master-port", port)
    commands = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1"),
            *((*static, "--node-rank", str(node)) if is_static else c10d),
            *own,
        )
        for node in range(2)
    ]
    return [stack.enter_context(Daemon("--probe-port", "0", command=c)) for c in commands]


def first_of(daemons: list[Daemon]) -> Daemon:
    """Which of the agents has rank 0 is torchrun's choice."""
    for daemon in daemons:
        daemon.wait_log(re.compile(r"started (http|node): process"), 90)
    (first,) = [daemon for daemon in daemons if "started http" in daemon.log]
    return first


def assert_all_end(daemons: list[Daemon], timeout_s: float) -> None:
    """After SIGTERM to each agent, by themselves, every process of theirs included."""
    agents = [psutil.Process(daemon.process.pid) for daemon in daemons]
    children = [child.pid for agent in agents for child in agent.children(recursive=True)]
    for daemon in daemons:
        daemon.signal(signal.SIGTERM)
    for daemon in daemons:
        daemon.wait_exit(timeout_s)
        assert "forcefully exiting" not in daemon.log
    wait_gone(children, 10)


def test_two_nodes_under_torchrun() -> None:
    """The same line on both."""
    with ExitStack() as stack:
        daemons = torchrun_nodes(stack)
        first = first_of(daemons)
        (second,) = [daemon for daemon in daemons if daemon is not first]
        first.wait_ready(90)
        assert first.tokens(PROMPT, 8, 0) == first.tokens(PROMPT, 8, 1)
        await_probe(second, 200)
        assert_all_end(daemons, 40)


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [True, False])
def test_open_requests_go_on_when_torchrun_starts_all_nodes_again(is_static: bool) -> None:
    with ExitStack() as stack:
        daemons = torchrun_nodes(stack, "--max-restarts", "3", is_static=is_static)
        first = first_of(daemons)
        (second,) = [daemon for daemon in daemons if daemon is not first]
        first.wait_ready(90)
        expected, http = start_all(first), first.pid("http")
        for stream in expected:
            stream.join()
        for victim in (second, first):
            streams = start_all(first)
            await_growth(streams, 4)
            ranks_of(victim)[0].kill()
            finish(streams, expected, 60)
            first.wait_ready(30)
            await_probe(second, 200)
        assert first.pid("http") == http
        assert_all_end(daemons, 40)


def test_a_signal_while_loading_ends_all_under_torchrun() -> None:
    with ExitStack() as stack:
        daemons = torchrun_nodes(stack)
        first_of(daemons)
        assert_all_end(daemons, 30)
