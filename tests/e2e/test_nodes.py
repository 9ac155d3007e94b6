"""Several nodes, here all on loopback: found, agreed, served, stopped and failed together."""

import contextlib
import pathlib
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from moed.config.errors import EXIT_CODES
from tests.daemon import Daemon, wait_gone
from tests.e2e.nodes import Node, TorchrunNode, free_port
from tests.e2e.streams import LONG, PROMPT, Stream, await_growth
from tests.moe.checkpoints import bundled_checkpoint

PROBES = re.compile(r"probes on (http://\S+)/readyz")
# What the specification allows, for both ends.
REFUSED_S = 30.0
FAILED_S = 60.0


@contextlib.contextmanager
def two_nodes(
    *arguments: str, first: tuple[str, ...] = (), second: tuple[str, ...] = ()
) -> Iterator[tuple[Node, Node]]:
    port = free_port()
    with Node(0, port, *arguments, *first) as one, Node(1, port, *arguments, *second) as two:
        yield one, two


def probe(node: Daemon, path: str = "/readyz") -> httpx.Response:
    url = node.wait_log(PROBES).group(1)
    return httpx.get(url + path, timeout=5)


def assert_refused(nodes: tuple[Daemon, ...], *words: str, within_s: float) -> None:
    """All end within the time, each with a sentence that has the words, and without a traceback."""
    deadline = time.monotonic() + within_s
    for node in nodes:
        assert node.wait_exit(max(1.0, deadline - time.monotonic())) != 0
    for node in nodes:
        assert "Traceback" not in node.log, node.log
        for word in words:
            assert word in node.log, f"{word!r} not in\n{node.log}"


def test_two_nodes_serve_as_one_and_stop_together() -> None:
    with Daemon() as alone:
        expected = alone.wait_ready().tokens(PROMPT, 24)
    with two_nodes() as (first, second):
        first.wait_ready()
        assert [first.tokens(PROMPT, 24, rank) for rank in (0, 1)] == [expected, expected]
        first.assert_alive()
        report = probe(second)
        assert (report.status_code, report.json()["ranks"]) == (200, [1])
        for path in ("/livez", "/startupz", "/health"):
            assert probe(second, path).status_code == 200
        assert probe(second, "/v1/models").status_code == 404
        assert "started rank-1" not in first.log and "started rank-0" not in second.log
        # A signal to either stops both, once open requests have ended.
        stream = Stream(first, {"prompt": PROMPT, **LONG})
        await_growth([stream], 4)
        second.signal(signal.SIGTERM)
        stream.join()
        assert (first.wait_exit(30), second.wait_exit(30)) == (0, 0)


def test_torchrun_over_two_nodes() -> None:
    port = free_port()
    with TorchrunNode(port) as one, TorchrunNode(port) as two:
        first = first_of(one, two)
        first.wait_ready(90)
        first.assert_alive()
        assert first.tokens(PROMPT, 8, 0) == first.tokens(PROMPT, 8, 1)
        other = two if first is one else one
        assert probe(other).status_code == 200
        first.signal(signal.SIGTERM)
        for node in (first, other):
            node.wait_exit(40)


def first_of(one: Daemon, two: Daemon) -> Daemon:
    """c10d says who is first: whoever has the front end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for node in (one, two):
            if "started http" in node.log:
                return node
        time.sleep(0.05)
    raise AssertionError(one.log + two.log)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (("--block-size", "32"), ("block_size", "rank 0 on", ": 16", "rank 1 on", ": 32")),
        (("--dtype", "bfloat16"), ("dtype", "float32", "bfloat16")),
        (("--max-num-batched-tokens", "512"), ("max_num_batched_tokens", ": 2048", ": 512")),
    ],
)
def test_settings_that_differ_are_refused_on_both(
    second: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with two_nodes(second=second) as nodes:
        assert_refused(nodes, "the ranks differ in", *words, within_s=REFUSED_S)


def test_models_that_differ_are_refused_on_both(tmp_path: pathlib.Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(bundled_checkpoint(), other)
    config = other / "config.json"
    config.write_text(re.sub(r'"rope_theta": [\d.]+', '"rope_theta": 5000.0', config.read_text()))
    with two_nodes(first=(bundled_checkpoint(),), second=(str(other),)) as nodes:
        assert_refused(nodes, "the ranks differ in", within_s=REFUSED_S)


def test_packages_that_differ_are_refused_on_both(tmp_path: pathlib.Path) -> None:
    """The second node finds another version of moed's metadata first."""
    folder = tmp_path / "moed-99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moed\nVersion: 99.0\n")
    port = free_port()
    with (
        Node(0, port) as first,
        Node(1, port, environment={"PYTHONPATH": str(tmp_path)}) as second,
    ):
        assert_refused((first, second), "moed (rank 0 on", "rank 1 on", "99.0", within_s=REFUSED_S)


def test_keys_that_differ_are_refused_on_both() -> None:
    port = free_port()
    keys = [{"MOED_TRANSPORT_KEY": letter * 40} for letter in "ab"]
    with Node(0, port, environment=keys[0]) as first, Node(1, port, environment=keys[1]) as second:
        assert_refused((first, second), "transport_key", within_s=REFUSED_S)
        assert "a" * 40 not in first.log + second.log


def test_a_model_missing_on_one_node_ends_both() -> None:
    with two_nodes(first=(bundled_checkpoint(),), second=("/no/such/model",)) as nodes:
        assert_refused(nodes, "/no/such/model", within_s=FAILED_S)
        assert "node 1" in nodes[0].log


def test_a_node_that_does_not_come_is_named() -> None:
    with Node(0, free_port(), "--rendezvous-timeout", "12") as first:
        assert_refused((first,), "rank 1 (node 1) did not come within 12 s", within_s=FAILED_S)
        # Said before, while it waited.
        assert "waiting for rank 1 (node 1) (10 s so far)" in first.log


def test_a_first_node_that_is_not_there_is_named() -> None:
    port = free_port()
    with Node(1, port, "--rendezvous-timeout", "3") as second:
        assert_refused((second,), f"did not answer at 127.0.0.1 port {port}", within_s=FAILED_S)


def test_wrong_numbers_of_nodes_are_refused() -> None:
    port = free_port()
    with Node(0, port, ranks=4) as first, Node(1, port, num_nodes=4, ranks=4) as second:
        assert_refused((first, second), "nnodes", within_s=REFUSED_S)


def test_the_same_node_twice_is_refused() -> None:
    port = free_port()
    with (
        Node(0, port, num_nodes=3, ranks=3) as first,
        Node(1, port, num_nodes=3, ranks=3) as second,
        Node(1, port, num_nodes=3, ranks=3) as again,
    ):
        assert_refused((first, second, again), "rank 1 has come twice", within_s=REFUSED_S)


def test_ports_in_use_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Node(0, port) as first:
            assert_refused((first,), f"127.0.0.1 port {port}", "--master-port", within_s=FAILED_S)
        rendezvous = free_port()
        with (
            Node(0, rendezvous) as first,
            Node(1, rendezvous, "--probe-port", str(port)) as second,
        ):
            assert_refused((first, second), str(port), "--probe-port", within_s=FAILED_S)


def test_a_lost_node_ends_open_requests_with_an_error() -> None:
    with two_nodes() as (first, second):
        first.wait_ready()
        stream = Stream(first, {"prompt": PROMPT, **LONG, "max_tokens": 2000})
        await_growth([stream], 4)
        keeper = re.search(r"started node: process (\d+)", second.log)
        assert keeper is not None
        pids = [second.process.pid, second.pid("rank-1"), int(keeper.group(1))]
        second.process.kill()
        # The ranks and the keeper of a launcher go with it.
        wait_gone(pids[1:], 10)
        stream.wait(FAILED_S)
        assert "message" in str(stream.error), stream.error
        assert first.wait_exit(FAILED_S) in EXIT_CODES
        assert "rank 1" in first.log


def test_a_signal_while_the_others_are_awaited_ends_at_once() -> None:
    with Node(0, free_port()) as first:
        first.wait_log(re.compile("started rank-0"))
        time.sleep(2)
        first.signal(signal.SIGTERM)
        first.wait_exit(10)
        assert "Traceback" not in first.log
