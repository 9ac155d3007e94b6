"""The kernels compile for real GPUs, and fit their shared memory, on a machine without one."""

import os
import pathlib
import subprocess
import sys

import pytest


def test_kernels_compile_for_gpus(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.moe.kernels.compile_all"),
            *("80:bf16", "90:bf16", "90:fp8e4nv"),
        ],
        cwd=pathlib.Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 27
