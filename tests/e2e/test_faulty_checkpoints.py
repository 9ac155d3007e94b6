"""A checkpoint that is no good ends the start soon, with one sentence and its exit code."""

import pathlib
import shutil
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from moed.config.errors import ModelError
from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon
from tests.moe.checkpoints import make_model

LONGEST_S = 20.0
NAME = "model.layers.1.mlp.experts.7.up_proj.weight"


def lose_a_file(folder: pathlib.Path) -> str:
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    return lost.name


def cut_a_file(folder: pathlib.Path) -> str:
    cut = sorted(folder.glob("*.safetensors"))[-1]
    cut.write_bytes(cut.read_bytes()[:-100])
    return cut.name


def bend_an_expert(folder: pathlib.Path) -> str:
    """One that rank 1 alone reads."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        if NAME in tensors:
            tensors[NAME] = torch.zeros(5, 64)
            save_file(tensors, path, {"format": "pt"})
    return NAME


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sound")
    make_model("qwen3_moe").save_pretrained(folder, max_shard_size="100KB")
    for path in bundled_checkpoint().glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lose_a_file, marks=pytest.mark.slow),
        pytest.param(cut_a_file, marks=pytest.mark.slow),
        bend_an_expert,
    ],
)
def test_the_start_ends(
    sound: pathlib.Path, tmp_path: pathlib.Path, spoil: Callable[[pathlib.Path], str]
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(sound, folder)
    named = spoil(folder)
    before = time.monotonic()
    with Daemon("--device", "cpu", str(folder)) as daemon:
        assert daemon.process.wait(LONGEST_S + 10) == ModelError.exit_code == 65
        assert time.monotonic() - before < LONGEST_S
        failures = [line for line in daemon.lines if "ERROR" in line]
        assert failures and "Traceback" not in daemon.log
        # A rank that waited for one that failed tells the consequence.
        causes = [line for line in failures if "another rank ended" not in line]
        assert causes and all("rank " in line and named in line for line in causes)
        if spoil is bend_an_expert:
            assert len(causes) == 1 and "rank 1 failed" in causes[0]
