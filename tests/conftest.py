"""Fixtures of all tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from moed.config.environ import let_waiting_threads_sleep

# As in a daemon; read when torch is imported.
let_waiting_threads_sleep()
import torch  # noqa: E402

from tests.worker_pool import WorkerPool  # noqa: E402

# Read when triton is imported, which `transformers` does too: so before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-seconds",
        type=float,
        default=1200.0,
        help="how long the long run of random load lasts (only with the slow tests)",
    )


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """`workers(world_size)`: a pool of ranks, kept for later tests unless a job of it failed."""
    pools: dict[int, WorkerPool] = {}

    def pool_of(world_size: int) -> WorkerPool:
        pool = pools.get(world_size)
        if pool is None or pool.is_closed:
            pool = pools[world_size] = WorkerPool(world_size)
        return pool

    yield pool_of
    for pool in pools.values():
        pool.close()
