"""Threads that work together: whoever calls, and however many help, the numbers are the same."""

import concurrent.futures
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from moed.moe import native
from moed.moe.native.matrix import NativeMatrix

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

NUM_CALLS, NUM_CALLERS = 200, 4
END_S = 60.0


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def matrix() -> NativeMatrix:
    library = native.library()
    assert library is not None
    weight = torch.randn(700, 96, generator=torch.Generator().manual_seed(0))
    return NativeMatrix(library, weight, None)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(130, 96, generator=torch.Generator().manual_seed(seed))


def test_number_of_threads_changes_no_bit() -> None:
    made, found = matrix(), []
    for num_threads in (1, 2, 3, 7, 2, 1, 5):
        torch.set_num_threads(num_threads)
        found += [made(rows(0)) for _ in range(20)]
    assert all(torch.equal(own, found[0]) for own in found)


def test_callers_at_the_same_time_do_not_meet() -> None:
    """Those that find the helpers taken work alone."""
    made = matrix()
    expected = [made(rows(seed)) for seed in range(NUM_CALLERS)]

    def call(seed: int) -> bool:
        return all(torch.equal(made(rows(seed)), expected[seed]) for _ in range(NUM_CALLS))

    with concurrent.futures.ThreadPoolExecutor(NUM_CALLERS) as callers:
        assert all(callers.map(call, range(NUM_CALLERS), timeout=END_S))


def test_process_ends_while_helpers_look_for_work() -> None:
    code = (
        "import torch; from tests.moe.native.test_team import matrix, rows;"
        "torch.set_num_threads(4); matrix()(rows(0)); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=END_S
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
