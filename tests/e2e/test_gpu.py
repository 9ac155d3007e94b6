"""The same answers from GPUs, also from two; skipped where there are none."""

import pytest
import torch

from tests.daemon import Daemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def answers(device: str, ranks: int) -> list[list[int]]:
    """Greedy tokens of a few prompts from a daemon on `device`."""
    arguments = ("--device", device, "--dtype", "float32", "--kv-cache-memory", "256MiB")
    with Daemon(*arguments, ranks=ranks) as daemon:
        daemon.wait_ready(180)
        found = [
            daemon.tokens([40 + seed] * (5 + 40 * seed), 16, seed % ranks) for seed in range(6)
        ]
        daemon.assert_alive()
    return found


def test_one_gpu_gives_the_same_tokens_as_a_cpu() -> None:
    assert answers("cuda", 1) == answers("cpu", 1)


def test_two_gpus_give_the_same_tokens_as_a_cpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert answers("cuda", 2) == answers("cpu", 1)
