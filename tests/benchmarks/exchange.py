"""Collectives between two ranks of one host: shared memory against gloo.

    python -m tests.benchmarks.exchange [--rows 32] [--hidden 512] [--rounds 2000]

One agreement's records, and one dispatch and combine of rows in bfloat16 with top-4 of 32 experts,
which most rows need on both ranks. Prints the median and the least in microseconds, on rank 0.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from moed.config.engine_config import FusedMoEConfig
from moed.config.expert_placement import ExpertPlacement
from moed.dist.all2all.base import All2AllBackend
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.record_exchange import make_exchange
from moed.dist.registry import create_backend
from tests.worker_pool import WorkerPool

NUM_EXPERTS, TOP_K, WARM_UP = 32, 4, 100
Figures = dict[str, tuple[float, float]]


def figures_of(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(WARM_UP + rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:]) * 1e6, min(times[WARM_UP:]) * 1e6


def there_and_back(backend: All2AllBackend, rows: tuple[Any, ...]) -> None:
    dispatched = backend.dispatch(*rows)
    backend.combine(dispatched.hidden, dispatched)


@torch.inference_mode()
def measure(groups: Groups, num_rows: int, hidden_size: int, rounds: int) -> Figures:
    """On each rank: by way and what travels, the median and the least."""
    torch.set_num_threads(1)
    placement = ExpertPlacement.linear(NUM_EXPERTS, groups.world_size)
    config = FusedMoEConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=hidden_size,
        intermediate_size=1,
        expert_parallel_size=groups.world_size,
        max_num_tokens=num_rows,
    )
    generator = torch.Generator().manual_seed(groups.rank)
    hidden = torch.randn(num_rows, hidden_size, generator=generator).bfloat16()
    ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    weights = torch.rand(num_rows, TOP_K, generator=generator)
    sizes = torch.full((groups.world_size,), num_rows, dtype=torch.int32)
    metadata = DPMetadata(sizes, groups.rank, 0)
    found: Figures = {}
    for way, is_single_node in (("gloo", False), ("shared memory", True)):
        with mock.patch.object(groups, "is_single_node", is_single_node):
            exchange = make_exchange(groups, "gloo", 7)
            arguments = (groups, placement, config, torch.bfloat16, torch.device("cpu"))
            backend = create_backend("all2allv", *arguments)

        rows = (hidden, ids, weights, metadata)
        found[f"records over {way}"] = figures_of(partial(exchange.exchange, [0] * 7), rounds)
        found[f"rows over {way}"] = figures_of(partial(there_and_back, backend, rows), rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    pool = WorkerPool(2)
    try:
        sizes = (arguments.rows, arguments.hidden, arguments.rounds)
        found = pool.run(measure, *sizes)[0]
    finally:
        pool.close()
    for name, (median, least) in found.items():
        print(f"{name:<28} {median:>8.1f} us ({least:.1f})")


if __name__ == "__main__":
    main()
