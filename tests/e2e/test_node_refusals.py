"""Nodes that do not fit together: every one of them ends, soon, with the same clear sentence."""

import json
import pathlib
import shutil
import socket
from contextlib import ExitStack

import pytest

from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon, free_port
from tests.e2e.nodes import Nodes, torchrun

DIFFERENT_S = 30.0
BAD_INPUT_S = 60.0


def assert_said(logs: list[str], *parts: str) -> None:
    """Each node has a line with all `parts`."""
    for log in logs:
        assert any(all(part in line for part in parts) for line in log.splitlines()), log


def copied_model(folder: pathlib.Path, **changes: object) -> str:
    """The bundled model with another config.json."""
    shutil.copytree(bundled_checkpoint(), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


@pytest.mark.parametrize(
    ("flag", "values", "key"),
    [
        ("--max-num-batched-tokens", ("64", "128"), "max_num_batched_tokens"),
        pytest.param("--dtype", ("float32", "bfloat16"), "dtype", marks=pytest.mark.slow),
        pytest.param(
            *("--all2all-backend", ("all2allv", "allgather_reducescatter"), "all2all_backend"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_that_differ(flag: str, values: tuple[str, str], key: str) -> None:
    with Nodes(own=[(flag, value) for value in values]) as nodes:
        assert_said(nodes.refusals(DIFFERENT_S), "the ranks differ in", key, *values)


def test_a_config_json_that_differs(tmp_path: pathlib.Path) -> None:
    """The same path on two nodes, with another file behind it: one of them looks at a link."""
    models = [copied_model(tmp_path / str(theta), rope_theta=theta) for theta in (5000, 7000)]
    link = tmp_path / "model"
    link.symlink_to(models[0])
    with ExitStack() as stack:
        nodes = Nodes(str(link))
        stack.push(nodes)
        first = nodes.start(0)
        first.pid("rank-0")
        link.unlink()
        link.symlink_to(models[1])
        nodes.start(1)
        logs = nodes.refusals(DIFFERENT_S)
    assert_said(logs, "the ranks differ in config.json: rope_theta", "5000", "7000")


def test_packages_that_differ(tmp_path: pathlib.Path) -> None:
    """One node takes another version of torch for installed."""
    folder = tmp_path / "torch-0.0.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.7\n")
    with Nodes(environments=[{}, {"PYTHONPATH": str(tmp_path)}]) as nodes:
        assert_said(nodes.refusals(DIFFERENT_S), "the ranks differ in torch", "0.0.7")


def test_another_transport_key(tmp_path: pathlib.Path) -> None:
    keys = [letter * 40 for letter in "ab"]
    with Nodes(environments=[{"MOED_TRANSPORT_KEY": key} for key in keys]) as nodes:
        logs = nodes.refusals(DIFFERENT_S)
    assert_said(logs, "the ranks differ in transport_key")
    assert not any(key in log for key in keys for log in logs)


def test_another_number_of_nodes() -> None:
    port = str(free_port())
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(
                Daemon(
                    *("--nnodes", str(count), "--node-rank", str(number), "--probe-port", "0"),
                    *("--master-addr", "127.0.0.1", "--master-port", port),
                    ranks=count,
                )
            )
            for number, count in enumerate((2, 3))
        ]
        assert all(daemon.wait_exit(BAD_INPUT_S) for daemon in daemons)
        assert_said([daemon.log for daemon in daemons], "differ in", "nnodes", ": 2", ": 3")


def test_a_model_that_is_missing_on_one_node() -> None:
    with Nodes(own=[(), ("/no/such/model",)]) as nodes:
        logs = nodes.refusals(BAD_INPUT_S)
        assert_said(logs, "/no/such/model")
        assert_said(logs[:1], "node 1", "failed")


def test_a_probe_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        port = taken.getsockname()[1]
        nodes = Nodes()
        stack.push(nodes)
        nodes.start(0)
        words = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1")
        nodes.daemons.append(
            stack.enter_context(
                Daemon(*words, "--master-port", str(nodes.port), "--probe-port", str(port))
            )
        )
        assert_said(nodes.refusals(BAD_INPUT_S), str(port), "--probe-port")


@pytest.mark.slow
def test_a_model_that_is_missing_on_the_first_node() -> None:
    with Nodes(own=[("/no/such/model",), ()]) as nodes:
        first, second = nodes.refusals(BAD_INPUT_S)
        assert_said([first], "/no/such/model")
        assert_said([second], "the first node did not answer")


@pytest.mark.slow
def test_a_port_that_is_taken() -> None:
    """By what listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Nodes(port=port) as nodes:
            first, second = nodes.refusals(BAD_INPUT_S)
            assert_said([first], f"cannot listen on 127.0.0.1 port {port}", "--master-port")
            assert_said([second], "first node", str(port))


@pytest.mark.slow
def test_a_wrong_address() -> None:
    """The others wait at a door that nobody opens; the first is not where it is said to be."""
    wrong = str(free_port())
    with ExitStack() as stack:
        nodes = Nodes()
        stack.push(nodes)
        nodes.start(0)
        words = ("--nnodes", "2", "--node-rank", "1", "--probe-port", "0")
        nodes.daemons.append(
            stack.enter_context(
                Daemon(*words, "--master-addr", "127.0.0.1", "--master-port", wrong)
            )
        )
        first, second = nodes.refusals(BAD_INPUT_S)
    assert_said([first], "rank 1 (node 1) did not come within")
    assert_said([second], f"the first node did not answer at 127.0.0.1 port {wrong}")


def test_an_address_of_another_machine() -> None:
    words = ("--nnodes", "2", "--master-addr", "192.0.2.7")
    with Daemon(*words) as daemon:
        assert daemon.wait_exit(BAD_INPUT_S) == 78, daemon.log
        assert_said([daemon.log], "cannot listen on 192.0.2.7", "--master-addr")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "parts"),
    [
        ((("--max-num-seqs", "4"), ("--max-num-seqs", "8")), ("max_num_seqs", ": 4", ": 8")),
        (((), ("/no/such/model",)), ("/no/such/model",)),
    ],
)
def test_the_same_under_torchrun(own: tuple[tuple[str, ...], ...], parts: tuple[str, ...]) -> None:
    command = torchrun(
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    )
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(Daemon("--probe-port", "0", *words, command=command))
            for words in own
        ]
        assert all(daemon.wait_exit(BAD_INPUT_S) for daemon in daemons)
        logs = [daemon.log for daemon in daemons]
        # torchrun has a traceback of its own.
        assert_said([log.partition("ChildFailedError")[0] for log in logs], *parts)
