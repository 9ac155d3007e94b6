"""One daemon with two ranks on the bundled model, shared by the tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.daemon import Daemon

MAX_NUM_BATCHED_TOKENS = 64


@pytest.fixture(scope="session")
def served() -> Iterator[Daemon]:
    budget = ("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--max-num-seqs", "48")
    with Daemon(*budget) as daemon:
        yield daemon.wait_ready()


@pytest.fixture
def daemon(served: Daemon) -> Iterator[Daemon]:
    """The shared daemon, checked after each test: alive, and at rest."""
    yield served
    served.assert_alive()
