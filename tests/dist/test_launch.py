"""Who started this process: torchrun's variables count only below torchrun itself."""

import json
import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from moed.dist.launch import LaunchEnvironment, detect_torchrun

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return VARIABLES


def set_parent(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    class Process:
        def parent(self) -> "Process":
            return self

        def cmdline(self) -> list[str]:
            if not command:
                raise psutil.AccessDenied
            return command

    monkeypatch.setattr(psutil, "Process", Process)


@pytest.mark.parametrize(
    "command",
    [
        ["/opt/venv/bin/python3.11", "/opt/venv/bin/torchrun", "--standalone", "job.py"],
        ["python", "-m", "torch.distributed.run", "job.py"],
        ["python", "-u", "-m", "torch.distributed.launch", "job.py"],
        ["python", "/opt/torch/distributed/run.py", "job.py"],
        # Options of the interpreter, also with values of their own.
        ["python", "-X", "dev", "-W", "ignore", "-u", "-m", "torch.distributed.run", "job.py"],
        ["/Python.app/Contents/MacOS/Python", "/bin/torchrun", "job.py"],
        ["torchrun", "job.py"],
    ],
)
def test_below_torchrun_its_variables_count(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], command: list[str]
) -> None:
    set_parent(monkeypatch, command)
    assert detect_torchrun() == LaunchEnvironment(3, 8, 1, 2, "node-1", 29500, "torchrun")


@pytest.mark.parametrize(
    "command",
    [
        ["bash"],
        ["python", "job.py", "--started-by", "me", "torchrun"],
        ["python", "/home/me/not_torchrun.py"],
        # What follows the program is its own affair.
        ["python", "job.py", "torchrun"],
        ["python", "-m", "pytest", "torchrun"],
        ["python", "-c", "import torchrun", "torchrun"],
        ["vim", "/opt/venv/bin/torchrun"],
        ["python"],
        [],  # a parent that may not be looked at
    ],
)
def test_elsewhere_they_have_leaked(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], command: list[str]
) -> None:
    set_parent(monkeypatch, command)
    assert detect_torchrun() is None


@pytest.mark.parametrize("name", VARIABLES)
def test_all_variables_are_needed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    set_parent(monkeypatch, ["torchrun"])
    monkeypatch.delenv(name)
    assert detect_torchrun() is None


@pytest.mark.parametrize("value", ["", "two", "1.5"])
def test_malformed_numbers_do_not_count(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], value: str
) -> None:
    set_parent(monkeypatch, ["torchrun"])
    monkeypatch.setenv("RANK", value)
    assert detect_torchrun() is None


@pytest.mark.parametrize(("local_world_size", "expected"), [(8, True), (4, False)])
def test_single_node(local_world_size: int, expected: bool) -> None:
    environment = LaunchEnvironment(0, 8, 0, local_world_size, "127.0.0.1", 1, "moed")
    assert environment.is_single_node is expected


WORKER = """
import dataclasses, json, pathlib, subprocess, sys

sys.path[:] = {path!r}
import torch

from moed.dist.agreement import gather_ints
from moed.dist.groups import init_groups
from moed.dist.launch import detect_torchrun
from moed.dist.rendezvous import open_store
from moed.server.lifecycle import leave
from tests.server.engine.configs import engine_config

torch.set_num_threads(1)
environment = detect_torchrun()
assert environment is not None
# A process that a worker starts has the variables too, but is not a worker.
code = "import sys; sys.path[:] = {path!r}; "
code += "from moed.dist.launch import detect_torchrun; print(detect_torchrun())"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
parallel = engine_config(ranks=environment.world_size).parallel
groups = init_groups(environment, parallel, open_store(environment, None, 60.0), None)
gathered = gather_ints(groups, 10 + groups.rank)
groups.close()
found = dict(dataclasses.asdict(environment), child=child.stdout.strip(), gathered=gathered)
pathlib.Path({folder!r}, str(environment.rank)).write_text(json.dumps(found))
# As the ranks do: torch leaves threads behind that may abort an interpreter's own end.
leave(0)
"""


def test_real_torchrun_is_detected_and_its_ranks_meet(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(path=sys.path, folder=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    log = (tmp_path / "log").open("w")
    with (
        log,
        subprocess.Popen(
            [*command, "--nproc-per-node", "2", str(script)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as agent,
    ):
        try:
            exit_code = agent.wait(150)
        finally:
            # The agent ends its workers with itself.
            agent.terminate()
    assert exit_code == 0, (tmp_path / "log").read_text()
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert (found["rank"], found["local_rank"]) == (rank, rank)
        assert (found["world_size"], found["local_world_size"]) == (2, 2)
        assert found["launcher"] == "torchrun" and found["store_port"] > 0
        assert found["gathered"] == [10, 11]
        assert found["child"] == "None"
