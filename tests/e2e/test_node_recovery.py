"""A rank that is lost on any of several nodes costs no request anything."""

import os
import re
import signal
import time

import httpx
import pytest

from tests.daemon import Daemon
from tests.e2e.nodes import Nodes, await_probe, kill_all
from tests.e2e.streams import (
    KINDS,
    LONG,
    PROMPT,
    Stream,
    assert_same,
    await_growth,
    await_status,
    finish,
    kill,
)
from tests.e2e.test_recovery import RECOVERY_S, assert_well, await_loss, is_ready

READY_S = 90.0
END_S = 30.0
BODIES = [{**KINDS[kind], "max_tokens": 60} for kind in ("greedy", "sampled", "logprobs")]
FOREVER = {**LONG, "prompt": PROMPT, "max_tokens": 1900}


def owner(nodes: Nodes, rank: int) -> Daemon:
    """The node that has it."""
    return next(node for node in nodes.daemons if f"started rank-{rank}:" in node.log)


def kill_rank(nodes: Nodes, rank: int) -> None:
    kill(owner(nodes, rank), f"rank-{rank}")


def rank_pids(nodes: Nodes) -> list[int]:
    """Of all nodes, in order."""
    return [pid for node in nodes.daemons for pid in node.rank_pids()]


def start_all(first: Daemon) -> list[Stream]:
    return [Stream(first, body) for body in BODIES]


def undisturbed(first: Daemon) -> list[Stream]:
    streams = start_all(first)
    for stream in streams:
        stream.join(RECOVERY_S)
    return streams


def assert_no_tracebacks(nodes: Nodes) -> None:
    assert "Traceback" not in nodes.logs, nodes.logs


def test_a_rank_killed_on_another_node_costs_no_request_anything() -> None:
    with Nodes() as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        before = rank_pids(nodes)
        streams = start_all(first)
        await_growth(streams, 8)
        kill_rank(nodes, 1)
        await_loss(first, 1)
        report = httpx.get(f"{first.url}/readyz", timeout=5)
        assert report.status_code == 503 and report.json()["status"] == "recovering"
        assert "rank 1 on node 1" in report.json()["reason"]
        assert "the ranks recover: rank 1" in await_probe(second, 503)
        finish(streams, expected, RECOVERY_S)
        assert_well(first)
        await_probe(second, 200)
        # Nothing but the one rank was started again, and by its own node.
        after = rank_pids(nodes)
        assert after[0] == before[0] and after[1] != before[1]
        assert [node.process.poll() for node in nodes.daemons] == [None, None]
        assert first.metrics()["moed:rank_losses_total", 1] == 1
        second.signal(signal.SIGTERM)
        assert [node.wait_exit(END_S) for node in nodes.daemons] == [0, 0], nodes.logs
        assert_no_tracebacks(nodes)


@pytest.mark.slow
def test_any_rank_of_two_nodes_twice_in_a_row_and_while_another_recovers() -> None:
    """Two nodes with two ranks each."""
    with Nodes("--max-restarts", "100", ranks_per_node=2) as nodes:
        first = nodes.daemons[0]
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        num_losses = 0
        for victim in range(4):
            other = (victim + 2) % 4
            for again, delay_s in ((victim, 0.0), (other, 0.3), (other, 1.2)):
                streams = start_all(first)
                await_growth(streams, 5)
                kill_rank(nodes, victim)
                await_loss(first, num_losses + 1)
                time.sleep(delay_s)
                kill_rank(nodes, again)
                await_loss(first, num_losses + 2)
                num_losses = first.log.count("Forming the group anew")
                finish(streams, expected, RECOVERY_S)
                assert_well(first)
        assert_no_tracebacks(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_ended_by_its_own_node(victim: int) -> None:
    with Nodes("--step-timeout", "4") as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        streams = start_all(first)
        await_growth(streams, 8)
        stopped = owner(nodes, victim).pid(f"rank-{victim}")
        os.kill(stopped, signal.SIGSTOP)
        await_status(first, "stalled")
        reason = httpx.get(f"{first.url}/readyz", timeout=5).json()["reason"]
        assert f"rank {victim} (process {stopped}" in reason, reason
        assert "stopped by a signal" in reason and "step" in reason
        assert "stopped by a signal" in await_probe(second, 503)
        finish(streams, expected, RECOVERY_S)
        assert f"process {stopped}: threads:" in owner(nodes, victim).log
        assert owner(nodes, victim).pid(f"rank-{victim}") != stopped
        assert_well(first)
        await_probe(second, 200)


@pytest.mark.slow
def test_a_rank_that_hangs_on_another_node_writes_its_stacks_there() -> None:
    fault = {"MOED_FAULT_INJECTION": "hang:rank=1:step=30"}
    with Nodes("--step-timeout", "4", environments=[fault, fault]) as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        streams = start_all(first)
        for stream in streams:
            stream.join(RECOVERY_S)
        pattern = r"rank 1 \(process \d+ on node 1, \S+\) keeps the others waiting"
        assert re.search(pattern, first.log) and "in step 30" in first.log
        assert "faults.py" in second.log and "on_step" in second.log
        assert_same(streams, undisturbed(first))
        assert_well(first)


@pytest.mark.slow
def test_a_short_pause_of_a_far_rank_costs_only_time() -> None:
    with Nodes("--step-timeout", "8") as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        streams = start_all(first)
        await_growth(streams, 8)
        paused = second.pid("rank-1")
        os.kill(paused, signal.SIGSTOP)
        await_status(first, "stalled")
        os.kill(paused, signal.SIGCONT)
        await_status(first, "ready")
        finish(streams, expected, RECOVERY_S)
        assert second.pid("rank-1") == paused
        await_probe(second, 200)
        assert_well(first)


@pytest.mark.slow
def test_a_rank_that_raises_on_another_node_is_started_again() -> None:
    fault = {"MOED_FAULT_INJECTION": "raise:rank=1:step=30"}
    with Nodes(environments=[fault, fault]) as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        streams = undisturbed(first)
        assert "rank 1 on node 1" in first.log
        assert "RuntimeError: injected fault" in first.log and "Traceback" in second.log
        finish(start_all(first), streams, RECOVERY_S)
        assert_well(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--all2all-backend", "deepep_low_latency"),
        ("--all2all-backend", "allgather_reducescatter"),
        ("-tp", "2"),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_with_other_backends_between_nodes(arguments: tuple[str, ...]) -> None:
    """The first of them starts all ranks of all nodes again."""
    with Nodes(*arguments) as nodes:
        first = nodes.daemons[0]
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        for victim in (len(rank_pids(nodes)) - 1, 0):
            streams = start_all(first)
            await_growth(streams, 5)
            before = rank_pids(nodes)
            kill_rank(nodes, victim)
            finish(streams, expected, RECOVERY_S)
            assert_well(first)
            if "deepep" in arguments[-1]:
                assert not set(before) & set(rank_pids(nodes))
        assert_no_tracebacks(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("last", [0, 1])
def test_too_many_restarts_on_all_nodes_together_end_all_cleanly(last: int) -> None:
    with Nodes("--max-restarts", "2") as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        stream = Stream(first, FOREVER)
        for loss, victim in enumerate((0, 1), 1):
            await_growth([stream], 5)
            kill_rank(nodes, victim)
            await_loss(first, loss)
            first.wait_ready()
        await_growth([stream], 5)
        kill_rank(nodes, last)
        codes = [node.wait_exit(END_S) for node in nodes.daemons]
        assert codes == [70, 69 if last == 0 else 70], nodes.logs
        assert "max_restarts" in first.log
        assert f"rank {last}" in first.lines[-1] and "killed by SIGKILL" in first.lines[-1]
        assert f"rank {last}" in second.log
        stream.wait(5)
        assert f"rank {last}" in str(stream.error)
        assert_no_tracebacks(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_exit_ends_all_nodes_with_the_first_loss(victim: int) -> None:
    with Nodes("--on-rank-failure", "exit") as nodes:
        first = nodes.daemons[0]
        first.wait_ready(READY_S)
        stream = Stream(first, FOREVER)
        await_growth([stream], 5)
        kill_rank(nodes, victim)
        assert all(node.wait_exit(END_S) in (69, 70) for node in nodes.daemons), nodes.logs
        stream.wait(5)
        assert stream.error is not None
        assert_no_tracebacks(nodes)


@pytest.mark.slow
def test_an_idle_group_of_nodes_recovers_too() -> None:
    with Nodes(own=((), (), ())) as nodes:
        first = nodes.daemons[0]
        first.wait_ready(READY_S)
        for number, victim in enumerate((2, 0), 1):
            first.assert_at_rest()
            kill_rank(nodes, victim)
            await_loss(first, number)
            assert_well(first)
        assert_no_tracebacks(nodes)


@pytest.mark.slow
def test_a_front_end_is_replaced_between_nodes() -> None:
    with Nodes() as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        before = rank_pids(nodes)
        orphans = [Stream(first, FOREVER, rank) for rank in range(2)]
        await_growth(orphans, 5)
        for _ in range(2):
            kill(first, "http")
            deadline = time.monotonic() + RECOVERY_S
            while not is_ready(first.url):
                assert time.monotonic() < deadline, nodes.logs
                time.sleep(0.02)
            first.assert_at_rest()
            finish(start_all(first), expected, RECOVERY_S)
        assert rank_pids(nodes) == before
        # Orders find their way by the new one too.
        streams = start_all(first)
        await_growth(streams, 5)
        kill_rank(nodes, 1)
        finish(streams, expected, RECOVERY_S)
        assert_well(first)
        await_probe(second, 200)
        assert_no_tracebacks(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["all2allv", "deepep_low_latency"])
def test_a_node_that_is_started_again_joins_its_launch(backend: str) -> None:
    """With the same line, twice; the first time before the others have noticed anything."""
    with Nodes("--all2all-backend", backend) as nodes:
        first, lost = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        for delay_s in (0.0, 6.0):
            streams = start_all(first)
            await_growth(streams, 5)
            kill_all(lost)
            nodes.daemons.remove(lost)
            time.sleep(delay_s)
            lost = nodes.start(1)
            finish(streams, expected, RECOVERY_S)
            assert "joins it again" in lost.log
            assert_well(first)
            await_probe(lost, 200)
        # It takes part as the one before did.
        streams = start_all(first)
        await_growth(streams, 5)
        kill_rank(nodes, 1)
        finish(streams, expected, RECOVERY_S)
        lost.signal(signal.SIGTERM)
        assert [node.wait_exit(END_S) for node in nodes.daemons] == [0, 0], nodes.logs


@pytest.mark.slow
def test_a_node_that_is_there_already_is_not_replaced() -> None:
    with Nodes() as nodes:
        first, second = nodes.daemons
        first.wait_ready(READY_S)
        expected = undisturbed(first)
        kill_rank(nodes, 1)
        await_loss(first, 1)
        first.wait_ready()
        pids = rank_pids(nodes)
        twin = nodes.start(1)
        assert twin.wait_exit(READY_S) == 69, twin.log
        assert_no_tracebacks(nodes)
        finish(start_all(first), expected, RECOVERY_S)
        nodes.daemons.remove(twin)
        assert rank_pids(nodes) == pids
