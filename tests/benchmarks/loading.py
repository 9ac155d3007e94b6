"""Loading a checkpoint beside reading the same bytes with safetensors alone.

    python -m tests.benchmarks.loading [--layers 10] [--ranks 2] [--rounds 9] [--warm]

Writes a Qwen3-MoE in bfloat16 of about 0.1 GB a layer to a temporary folder. Each round runs, in
fresh processes and one after the other, both for rank 0: its share of the experts and all else. The
system forgets the files before each, so that both wait for the disk as a first start does; with
--warm they stay in its cache. Prints both medians, their ratio, and the growth of anonymous memory
against what the rank keeps.

Read the ratio: 1.0 is the speed of reading alone. Both depend on memory and page faults, or on the
disk, so other work on the machine shows at once: compare within one run, of several rounds.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.moe.large import load_seconds, loaded, read, write_large


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own, whose memory is untouched."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def forget(folder: str) -> None:
    """Drop the files from the system's cache."""
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_large(Path(folder), given.layers)
        loads, reads, num_bytes = [], [], 0
        for number in range(given.rounds):
            # In turn the one first and the other, since a machine's memory has moods.
            for is_load in (number % 2 == 0, number % 2 == 1):
                if not given.warm:
                    forget(folder)
                if is_load:
                    loads.append(alone(load_seconds, folder, 0, given.ranks))
                else:
                    num_bytes, took = alone(read, folder, 0, given.ranks)
                    reads.append(took)
        own, peak, _ = alone(loaded, folder, 0, given.ranks)
    load_s, read_s = statistics.median(loads), statistics.median(reads)
    ratios = sorted(load / read for load, read in zip(loads, reads, strict=True))
    print(f"checkpoint {size / 1e9:.2f} GB; rank 0 of {given.ranks} reads {num_bytes / 1e9:.2f} GB")
    print(f"load {load_s:.2f} s, read {read_s:.2f} s: ratio {load_s / read_s:.2f}")
    print("ratio of each round: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    print(f"keeps {own / 1e9:.2f} GB, grew by {peak / 1e9:.2f} GB at most: {peak / own:.2f}")


if __name__ == "__main__":
    main()
