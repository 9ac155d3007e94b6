"""Faults under load: what they cost the requests that are open, and how long until all go on.

    python -m tests.benchmarks.recovery [--ranks 2,3,4] [--repeats 20] [--faults kill,stop,...]
        [--json FILE] [-- flags of moed serve]

Every repeat opens the same requests (greedy and with a seed), has a fault happen while all of them
stream, and compares what comes with what came undisturbed. The clients never retry. Seconds are
from the last signal sent to the first token of the last request to go on.

Goal, on a CPU with the bundled model: nothing lost, repeated or wrong; a median under 5 s, none
above 15 s; the exit code is 1 where it is missed. A stop is found after `--step-timeout`, here 2 s,
which counts. A killed front end loses its connections: there, seconds are until another one is
ready on the port. For a reader that stalls, they are the longest that any other request waited for
a token.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.faults import (
    HEADER,
    SLOW_READER_TIMEOUT_S,
    Bed,
    Measure,
    Row,
    front_end,
    full_disk,
    kill_another,
    kill_rank,
    kill_twice,
    losing,
    stalled_reader,
    stop,
)
from tests.daemon import Daemon
from tests.small_disk import SmallDiskDaemon, why_not

START_S = 120.0
MEDIAN_S, WORST_S = 5.0, 15.0
LIMITS = ("--max-restarts", "100000", "--slow-reader-timeout", str(SLOW_READER_TIMEOUT_S))


@dataclass(frozen=True)
class Fault:
    """One that happens to each rank in turn, or to what there is once only."""

    text: str
    measure: Measure
    daemon: type[Daemon] = Daemon
    arguments: tuple[str, ...] = ()
    """Of its daemon."""
    is_of_a_rank: bool = True


FAULTS = {
    "kill": Fault("SIGKILL of rank {}", losing(1, kill_rank)),
    "twice": Fault("SIGKILL of rank {}, and again", losing(2, kill_twice)),
    "another": Fault("SIGKILL of rank {}, then the next", losing(2, kill_another)),
    "stop": Fault("SIGSTOP of rank {}", losing(1, stop), arguments=("--step-timeout", "2")),
    "disk": Fault("disk full, then SIGKILL of rank {}", full_disk, SmallDiskDaemon),
    "reader": Fault("a reader of rank {} stalls", stalled_reader),
    "http": Fault("SIGKILL of the front end", front_end, is_of_a_rank=False),
}


class Bench:
    """Daemons of so many ranks, started when needed, and anew after a repeat that failed."""

    def __init__(self, ranks: int, serve: Sequence[str]) -> None:
        self._ranks = ranks
        self._serve = serve
        self._bed: Bed | None = None
        self._arguments: tuple[str, ...] = ()

    def run(self, fault: Fault, repeats: int) -> list[Row]:
        rows = []
        for victim in range(self._ranks if fault.is_of_a_rank else 1):
            row = Row(self._ranks, fault.text.format(victim))
            for _ in range(repeats):
                self._repeat(fault, row, victim)
            print(row, flush=True)
            rows.append(row)
        return rows

    def _repeat(self, fault: Fault, row: Row, victim: int) -> None:
        try:
            fault.measure(self._bed_for(fault), row, victim)
        except Exception as error:
            row.failures.append(f"{type(error).__name__}: {str(error)[:1000]}")
            traceback.print_exc()
            if self._bed is not None:
                print("\n".join(self._bed.daemon.lines[-150:]), file=sys.stderr, flush=True)
            self.close()

    def _bed_for(self, fault: Fault) -> Bed:
        is_kind = self._bed is not None and type(self._bed.daemon) is fault.daemon
        if self._bed is not None and is_kind and self._arguments == fault.arguments:
            return self._bed
        self.close()
        self._arguments = fault.arguments
        daemon = fault.daemon(*LIMITS, *fault.arguments, *self._serve, ranks=self._ranks)
        try:
            self._bed = Bed(daemon.wait_ready(START_S))
        except BaseException:
            daemon.__exit__(None, None, None)
            raise
        return self._bed

    def close(self) -> None:
        """Safe to call twice."""
        bed, self._bed = self._bed, None
        if bed is not None:
            bed.daemon.__exit__(None, None, None)


def misses(rows: Sequence[Row]) -> list[str]:
    """Where the goal was missed."""
    found = []
    for row in rows:
        name = f"{row.ranks} ranks, {row.fault}"
        if not row.is_good:
            found.append(f"{name}: requests were lost, or got other tokens")
        if row.seconds and statistics.median(row.seconds) > MEDIAN_S:
            found.append(f"{name}: the median is above {MEDIAN_S:g} s")
        if row.seconds and max(row.seconds) > WORST_S:
            found.append(f"{name}: one took more than {WORST_S:g} s")
    return found


def as_json(rows: Sequence[Row], repeats: int) -> dict[str, Any]:
    """What is printed, and each repeat's seconds."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "repeats": repeats,
        "rows": [
            {
                **asdict(row),
                "median_s": statistics.median(row.seconds) if row.seconds else None,
                "worst_s": max(row.seconds, default=None),
            }
            for row in rows
        ],
        "misses": misses(rows),
    }


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    words, serve = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    given = parser.parse_args(words)
    rows: list[Row] = []
    for num_ranks in map(int, given.ranks.split(",")):
        bench = Bench(num_ranks, serve)
        print(f"\nDP {num_ranks}, {given.repeats} repeats\n{HEADER}", flush=True)
        try:
            for name in given.faults.split(","):
                fault = FAULTS[name]
                if fault.daemon is SmallDiskDaemon and (reason := why_not()) is not None:
                    print(f"{fault.text}: not measured, {reason}")
                    continue
                rows += bench.run(fault, given.repeats)
                if given.json is not None:
                    text = json.dumps(as_json(rows, given.repeats), indent=2)
                    given.json.write_text(text, encoding="utf-8")
        finally:
            bench.close()
    print("\n" + ("\n".join(misses(rows)) or "the goal is reached"), flush=True)
    sys.exit(1 if misses(rows) else 0)


if __name__ == "__main__":
    main()
