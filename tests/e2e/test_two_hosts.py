"""Two hosts with a network between them: what cannot be seen on one machine's loopback."""

import re
import subprocess
import time

import httpx
import pytest

from moed.config.errors import EXIT_CODES
from tests.daemon import LISTENING, Daemon
from tests.e2e.streams import LONG, PROMPT, Stream, await_growth, kill
from tests.e2e.two_hosts import Host, TwoHosts

PORT = 29511
LENGTH = 80
READY_S = 60.0
# What the specification allows.
RED_S = 10.0
END_S = 60.0
ON_ANY_ADDRESS = re.compile(r"(?:listening on|probes on) http://\S+?:(\d+)")


def readiness(host: Host, node: Daemon) -> tuple[int, str]:
    """Status and reason of the node's probe, asked there."""
    port = node.wait_log(ON_ANY_ADDRESS).group(1)
    try:
        answer = host.call(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5))
    except httpx.TransportError as error:
        return 0, str(error)
    return answer.status_code, str(answer.json().get("reason"))


def await_readiness(host: Host, node: Daemon, code: int, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        found, reason = readiness(host, node)
        if found == code:
            return reason
        assert time.monotonic() < deadline, f"{found} {reason}\n{node.log}"
        time.sleep(0.1)


def await_both_ready(hosts: TwoHosts, first: Daemon, second: Daemon) -> None:
    await_readiness(hosts.first, first, 200, READY_S)
    await_readiness(hosts.second, second, 200, READY_S)


def nodes_of(hosts: TwoHosts) -> tuple[Daemon, Daemon]:
    """`moed serve` on both, one rank each."""
    first, second = (
        Daemon(
            *("--nnodes", "2", "--node-rank", str(number)),
            *("--master-addr", hosts.first.address, "--master-port", str(PORT)),
            *("--probe-port", "0", "--recovery-timeout", "15"),
            command=host.command("-m", "moed.server"),
        )
        for number, host in enumerate(hosts.hosts)
    )
    return first, second


def torchrun_on(host: Host, hosts: TwoHosts) -> Daemon:
    """The same line on both."""
    agent = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.first.address}:{PORT}")
    command = host.command(*agent, *meeting, "-m", "moed.server")
    return Daemon("--probe-port", "0", command=command)


def listening_on(host: Host) -> set[str]:
    """All addresses where anything there takes connections."""
    script = (
        "import psutil; print(*(one.laddr.ip for one in psutil.net_connections('inet') "
        "if one.status == 'LISTEN'))"
    )
    command = host.command("-c", script)
    return set(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split())


def open_stream(hosts: TwoHosts, first: Daemon, max_tokens: int = 1900) -> Stream:
    # A thread is born in the namespace of the one that starts it.
    body = {**LONG, "prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens}
    stream: Stream = hosts.first.call(lambda: Stream(first, body))
    await_growth([stream], 4)
    return stream


@pytest.mark.slow
def test_a_cut_cable_turns_both_red_and_then_ends_both() -> None:
    with TwoHosts() as hosts:
        first, second = nodes_of(hosts)
        with first, second:
            await_both_ready(hosts, first, second)
            tokens = hosts.first.call(lambda: first.tokens(PROMPT, 24, 1))
            assert tokens == hosts.first.call(lambda: first.tokens(PROMPT, 24, 0))
            sent = {"intra": 0.0, "inter": 0.0}
            for labels, count in hosts.first.call(lambda: first.series("moed:all2all_bytes_total")):
                sent[labels["scope"]] += count
            assert sent["inter"] > 0 == sent["intra"]
            stream = open_stream(hosts, first)
            cut_at = time.monotonic()
            hosts.cut()
            # Both sides say so in time, and who it is that they do not hear.
            reason = await_readiness(hosts.first, first, 503, RED_S)
            assert hosts.second.name in reason
            left_s = max(1.0, RED_S - (time.monotonic() - cut_at))
            assert "the first node" in await_readiness(hosts.second, second, 503, left_s)
            assert stream.error is None
            stream.wait(END_S)
            assert hosts.second.name in str(stream.error)
            for node in (first, second):
                assert str(node.wait_exit(END_S)) in EXIT_CODES, node.log
                assert "Traceback" not in node.log
            assert "the network between is cut" in first.log
            assert "the network between is cut" in second.log


@pytest.mark.slow
def test_both_listen_on_their_network_and_their_loopback_alone() -> None:
    with TwoHosts() as hosts:
        nodes = nodes_of(hosts)
        with nodes[0], nodes[1]:
            await_both_ready(hosts, *nodes)
            for host in hosts.hosts:
                assert listening_on(host) == {"127.0.0.1", host.address}


@pytest.mark.slow
def test_a_cable_that_is_put_in_again_costs_only_time() -> None:
    with TwoHosts() as hosts:
        first, second = nodes_of(hosts)
        with first, second:
            await_both_ready(hosts, first, second)
            tokens = hosts.first.call(lambda: first.tokens(PROMPT, LENGTH, 1))
            streams = [open_stream(hosts, first, LENGTH) for _ in range(2)]
            hosts.cut()
            await_readiness(hosts.first, first, 503, RED_S)
            hosts.mend()
            for stream in streams:
                stream.join(END_S)
                assert stream.choices[0].token_ids == tokens
            await_both_ready(hosts, first, second)


@pytest.mark.slow
def test_a_rank_killed_on_either_host_costs_no_request_anything() -> None:
    with TwoHosts() as hosts:
        nodes = nodes_of(hosts)
        with nodes[0], nodes[1]:
            await_both_ready(hosts, *nodes)
            tokens = hosts.first.call(lambda: nodes[0].tokens(PROMPT, LENGTH, 1))
            for victim in (1, 0):
                streams = [open_stream(hosts, nodes[0], LENGTH) for _ in range(2)]
                kill(nodes[victim], f"rank-{victim}")
                for stream in streams:
                    stream.join(END_S)
                    assert stream.choices[0].token_ids == tokens
                await_both_ready(hosts, *nodes)
            assert hosts.second.name in nodes[0].log


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_ends_the_other(lost: int) -> None:
    with TwoHosts() as hosts:
        nodes = nodes_of(hosts)
        with nodes[0], nodes[1]:
            await_both_ready(hosts, *nodes)
            stream = open_stream(hosts, nodes[0])
            nodes[lost].process.kill()
            assert str(nodes[1 - lost].wait_exit(END_S)) in EXIT_CODES
            stream.wait(END_S)
            assert stream.error is not None


@pytest.mark.slow
def test_torchrun_with_the_same_line_on_both() -> None:
    with TwoHosts() as hosts:
        with torchrun_on(hosts.first, hosts) as one, torchrun_on(hosts.second, hosts) as two:
            deadline = time.monotonic() + READY_S
            while not (LISTENING.search(one.log) or LISTENING.search(two.log)):
                assert time.monotonic() < deadline, one.log + two.log
                time.sleep(0.1)
            pairs = [(hosts.first, one), (hosts.second, two)]
            if LISTENING.search(two.log):
                pairs.reverse()
            for host, node in pairs:
                await_readiness(host, node, 200, READY_S)
            host, node = pairs[0]
            assert len(host.call(lambda: node.tokens(PROMPT, 8, 1))) == 8
