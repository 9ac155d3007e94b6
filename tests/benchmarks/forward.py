"""The model's forward alone: milliseconds of a decode step, native kernels against torch's.

    python -m tests.benchmarks.forward --model DIR [--requests 1,8,32] [--context 160] [--steps 30]

DP 1 with all threads of the machine, then DP 2 with one thread each, where the requests are spread
over both ranks. Kernels take turns, a few steps each, so that a noisy machine meets both alike. The
table holds the median and the least of all steps; only ratios within one run compare.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

import torch

from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import make_kv_cache
from moed.moe.model import Decoder
from moed.moe.native import use_kernels
from tests.moe.harness import BLOCK_SIZE, engine_config, load, one_rank
from tests.worker_pool import WorkerPool

KERNELS = ("torch", "native")
WARM_UP, TURN = 3, 5


def decode_batch(num_requests: int, context: int, vocab_size: int) -> ForwardBatch:
    """One token of each request; blocks are scattered."""
    width = -(-context // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(num_requests)
    tables = torch.randperm(num_requests * width, generator=generator).view(num_requests, width)
    positions = torch.full((num_requests,), context - 1)
    slots = tables[:, -1] * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        token_ids=torch.randint(vocab_size, (num_requests,), generator=generator),
        positions=positions,
        slot_mapping=slots,
        query_lens=(1,) * num_requests,
        context_lens=(context,) * num_requests,
        block_tables=tables,
        logits_indices=torch.arange(num_requests),
    )


class Bench:
    """Steps of one rank."""

    def __init__(self, folder: str, groups: Groups, dtype: str, context: int, most: int) -> None:
        backend = "local" if groups.world_size == 1 else "all2allv"
        config = engine_config(
            pathlib.Path(folder), backend=backend, ranks=groups.world_size, dtype=dtype
        )
        self._config = config
        self._groups, self._context = groups, context
        self._decoders: dict[str, Decoder] = {}
        for kernels in KERNELS:
            runner = dataclasses.replace(config.runner, cpu_kernels=kernels)
            self._decoders[kernels] = load(dataclasses.replace(config, runner=runner), groups)
        num_blocks = most * -(-context // BLOCK_SIZE)
        model, kind = config.model, getattr(torch, dtype)
        self._cache = make_kv_cache(
            model, model.num_kv_heads, num_blocks, 0, BLOCK_SIZE, kind, torch.device("cpu")
        )

    @torch.inference_mode()
    def times(self, sizes: list[int], num_steps: int) -> dict[str, list[float]]:
        """Seconds of each step by kernels, for `sizes` requests of each rank."""
        rank = self._groups.rank
        batch = decode_batch(sizes[rank], self._context, self._config.model.vocab_size)
        metadata = DPMetadata(torch.tensor(sizes, dtype=torch.int32), rank, 0)
        times: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
        while len(times[KERNELS[-1]]) < num_steps:
            for kernels in KERNELS:
                use_kernels(kernels)
                for step in range(WARM_UP + TURN):
                    started = time.perf_counter()
                    self._decoders[kernels].forward(batch, self._cache, metadata)
                    if step >= WARM_UP:
                        times[kernels].append(time.perf_counter() - started)
        return times


def run_rank(
    groups: Groups, folder: str, dtype: str, context: int, loads: list[int], num_steps: int
) -> list[dict[str, list[float]]]:
    """On every rank of a group: the times for each number of requests."""
    torch.set_num_threads(1)
    bench = Bench(folder, groups, dtype, context, max(loads))
    size = groups.world_size
    shares = [[load // size + (rank < load % size) for rank in range(size)] for load in loads]
    return [bench.times(share, num_steps) for share in shares]


def show(name: str, loads: list[int], found: list[dict[str, list[float]]]) -> None:
    for load_size, times in zip(loads, found, strict=True):
        (slow, slow_min), (fast, fast_min) = (
            (statistics.median(times[kernels]) * 1e3, min(times[kernels]) * 1e3)
            for kernels in KERNELS
        )
        print(
            f"{name:<22} {load_size:>8} {slow:>8.2f} ({slow_min:>6.2f}) {fast:>8.2f} "
            f"({fast_min:>6.2f}) {slow / fast:>7.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    loads = [int(size) for size in arguments.requests.split(",")]
    print(f"{'':<22} {'requests':>8} {'torch ms':>17} {'native ms':>17} {'ratio':>7}")
    common = (arguments.model, arguments.dtype, arguments.context)
    bench = Bench(common[0], one_rank(), *common[1:], max(loads))
    found = [bench.times([load_size], arguments.steps) for load_size in loads]
    show(f"DP 1, {torch.get_num_threads()} threads", loads, found)
    pool = WorkerPool(2)
    try:
        by_rank = pool.run(run_rank, *common, loads, arguments.steps)
    finally:
        pool.close()
    show("DP 2, 1 thread each", loads, by_rank[0])


if __name__ == "__main__":
    main()
