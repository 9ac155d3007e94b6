"""Greedy texts over several ranks equal `transformers`, token for token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.moe.checkpoints import make_checkpoint, prompt, true_greedy
from tests.moe.rank_jobs import generate
from tests.worker_pool import WorkerPool


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2allv"])
def test_greedy_tokens_beside_an_idle_rank(
    workers: Callable[[int], WorkerPool], tmp_path: Path, family: str, backend: str
) -> None:
    torch.set_num_threads(1)
    truth = make_checkpoint(family, tmp_path)
    prompts = [prompt(9, seed=3), [], prompt(21, seed=4)]
    found = workers(3).run(generate, str(tmp_path), backend, prompts, 24)
    assert found == [true_greedy(truth, tokens, 24) if tokens else [] for tokens in prompts]
    assert found[0] != found[2]
