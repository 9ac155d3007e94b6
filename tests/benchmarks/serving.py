"""Load on the daemon: tokens per second, time to first token, inter-token latency.

    python -m tests.benchmarks.serving [--model DIR] [--ranks 1,2] [flags of moed bench]
        [-- flags of moed serve]

Starts one daemon for each number of ranks, and has `moed bench` measure it. Figures of different
machines, or of one noisy machine at different times, do not compare; ratios within one run do.
"""

import argparse
import sys

from moed.server.bench.command import bench
from tests.daemon import Daemon

START_S = 300.0


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    words, serve = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="checkpoint folder; default: the bundled model")
    parser.add_argument("--ranks", default="1,2")
    given, rest = parser.parse_known_args(words)
    model = [given.model] if given.model else []
    for num_ranks in map(int, given.ranks.split(",")):
        with Daemon(*model, *serve, ranks=num_ranks) as daemon:
            daemon.wait_ready(START_S)
            print(f"\nDP {num_ranks}")
            bench([daemon.url, *rest])


if __name__ == "__main__":
    main()
