"""Batched experts on a CPU: what a decode step costs with a small and with a large budget.

    python -m tests.benchmarks.experts [--rows 64] [--experts 8] [--budgets 64,4096]

The same rows are spread over the experts in buffers of each capacity, one rank of EP 1, so that
capacity is the budget B. Budgets take turns, call by call, so that a noisy machine meets both
alike. Prints, by budget, the median time of a call, the size of its output, and how much of that
output was ever touched, in memory pages. Ratios within one run compare; times of different
machines do not.
"""

import argparse
import statistics
import time

import psutil
import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts import ExpertWeights, TorchBatchedExperts

# One layer of Qwen3-30B-A3B.
HIDDEN, SIZE = 2048, 768
WARMUP = 5


def weights_of(num_experts: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(num_experts, HIDDEN, SIZE, generator=generator) / SIZE**0.5
    return ExpertWeights.plain(gate_up, down)


def rows_of(num_rows: int, num_experts: int, capacity: int) -> Dispatched:
    """`num_rows` over all experts, as even as it goes; the rest of the buffer is never touched."""
    counts = [
        num_rows // num_experts + (expert < num_rows % num_experts) for expert in range(num_experts)
    ]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.empty(num_experts, capacity, HIDDEN)
    for expert, count in enumerate(counts):
        hidden[expert, :count] = torch.randn(count, HIDDEN, generator=generator)
    return Dispatched(hidden, None, None, torch.tensor(counts, dtype=torch.int32), None)


def touched_bytes(experts: TorchBatchedExperts, rows: Dispatched) -> int:
    """Growth of this process's resident memory while the output of a call is held."""
    process = psutil.Process()
    before = process.memory_info().rss
    output = experts(rows, False)
    after = process.memory_info().rss
    del output
    return int(after - before)


@torch.inference_mode()
def measure(num_rows: int, num_experts: int, budgets: list[int], num_calls: int) -> None:
    experts = TorchBatchedExperts(weights_of(num_experts))
    rows = {budget: rows_of(num_rows, num_experts, budget) for budget in budgets}
    times: dict[int, list[float]] = {budget: [] for budget in budgets}
    for call in range(WARMUP + num_calls):
        for budget in budgets:
            start = time.perf_counter()
            experts(rows[budget], False)
            if call >= WARMUP:
                times[budget].append(time.perf_counter() - start)
    first = statistics.median(times[budgets[0]])
    print(f"{num_rows} rows, {num_experts} experts, D {HIDDEN}, I {SIZE}, float32")
    print(f"{'B':>6} {'ms':>8} {'ratio':>6} {'output MiB':>11} {'touched MiB':>12}")
    for budget in budgets:
        median = statistics.median(times[budget])
        size, touched = rows[budget].hidden.nbytes, touched_bytes(experts, rows[budget])
        print(
            f"{budget:>6} {1000 * median:>8.3f} {median / first:>6.2f} {size / 2**20:>11.1f} "
            f"{touched / 2**20:>12.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--budgets", default="64,4096")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    budgets = [int(budget) for budget in options.budgets.split(",")]
    measure(options.rows, options.experts, budgets, options.calls)


if __name__ == "__main__":
    main()
