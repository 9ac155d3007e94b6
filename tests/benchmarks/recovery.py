"""Faults under load: what they cost the requests that are open, and how long until all go on.

    python -m tests.benchmarks.recovery [--ranks 2,3,4] [--repeats 20] [--faults kill,stop,...]
        [-- flags of moed serve]

Every repeat opens the same requests (greedy and with a seed), has a fault happen while all of them
stream, and compares what comes with what came undisturbed. The clients never retry. Seconds are
from the last signal sent to the first token of the last request to go on.

Goal, on a CPU with the bundled model: nothing lost, repeated or wrong; a median of kills under 5 s,
none above 15 s. A stop is found after `--step-timeout`, here 2 s, which counts. A killed front end
loses its connections: there, seconds are until another one is ready on the port.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.daemon import Daemon
from tests.e2e.streams import LONG, PROMPT, Stream, await_growth, kill

START_S = 120.0
RECOVERY_S = 60.0
STEP_TIMEOUT_S = 2
NUM_STREAMS = 6
NUM_TOKENS = 500


def bodies() -> list[dict[str, Any]]:
    """Half greedy, half sampled with a seed."""
    return [
        {
            **LONG,
            "prompt": PROMPT[number:],
            "temperature": number % 2,
            "seed": number,
            "max_tokens": NUM_TOKENS,
        }
        for number in range(NUM_STREAMS)
    ]


@dataclass
class Row:
    """One line of the table."""

    fault: str
    num_open: int = 0
    num_lost: int = 0
    num_repeated: int = 0
    num_wrong: int = 0
    seconds: list[float] = field(default_factory=list)

    def compare(self, streams: list[Stream], expected: list[list[int]]) -> None:
        """Take in what the `streams` have given, which all have ended or failed."""
        for stream, tokens in zip(streams, expected, strict=True):
            self.num_open += 1
            self.num_lost += stream.error is not None or not stream.is_done
            found = tokens_of(stream)
            self.num_repeated += max(0, len(found) - len(tokens))
            self.num_wrong += sum(a != b for a, b in zip(found, tokens, strict=False))

    def __str__(self) -> str:
        counts = (self.num_open, self.num_lost, self.num_repeated, self.num_wrong)
        times = f"{statistics.median(self.seconds):8.2f} {max(self.seconds):8.2f}"
        return f"{self.fault:<34}" + "".join(f"{count:>9}" for count in counts) + " " + times


HEADER = f"{'fault':<34}{'open':>9}{'lost':>9}{'repeated':>9}{'wrong':>9}   median      max s"


def tokens_of(stream: Stream) -> list[int]:
    return stream.choices[0].token_ids if stream.choices else []


def await_count(daemon: Daemon, text: str, count: int) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while daemon.log.count(text) < count:
        assert time.monotonic() < deadline, daemon.log[-3000:]
        time.sleep(0.005)


Fault = Callable[[Daemon, int], None]


def kill_rank(daemon: Daemon, victim: int) -> None:
    kill(daemon, f"rank-{victim}")


def stop(daemon: Daemon, victim: int) -> None:
    os.kill(daemon.pid(f"rank-{victim}"), signal.SIGSTOP)


def kill_twice(daemon: Daemon, victim: int) -> None:
    """The same rank again, right after the streams go on."""
    num_ready = daemon.log.count("ready again")
    kill_rank(daemon, victim)
    await_count(daemon, "ready again", num_ready + 1)
    kill_rank(daemon, victim)


def kill_another(daemon: Daemon, victim: int) -> None:
    """Another rank while the first recovers."""
    num_lost = daemon.log.count("Forming the group anew")
    kill_rank(daemon, victim)
    await_count(daemon, "Forming the group anew", num_lost + 1)
    time.sleep(0.4)
    kill_rank(daemon, (victim + 1) % daemon.ranks)


FAULTS: dict[str, tuple[str, Fault, int]] = {
    "kill": ("SIGKILL of rank {}", kill_rank, 1),
    "twice": ("SIGKILL of rank {}, and again", kill_twice, 2),
    "another": ("SIGKILL of rank {}, then the next", kill_another, 2),
    "stop": ("SIGSTOP of rank {}", stop, 1),
}


def measure(daemon: Daemon, row: Row, fault: Fault, victim: int, losses: int) -> None:
    """One repeat."""
    streams = [Stream(daemon, body) for body in bodies()]
    await_growth(streams, 5)
    before = daemon.log.count("Forming the group anew")
    fault(daemon, victim)
    started = time.monotonic()
    await_count(daemon, "Forming the group anew", before + losses)
    epoch = daemon.log.count("Forming the group anew")
    await_count(daemon, f"ready again: all ranks serve in epoch {epoch}", 1)
    await_growth(streams, 1)
    row.seconds.append(time.monotonic() - started)
    for stream in streams:
        stream.wait(RECOVERY_S)
    row.compare(streams, expected_of(daemon))
    daemon.assert_at_rest()


EXPECTED: dict[int, list[list[int]]] = {}


def expected_of(daemon: Daemon) -> list[list[int]]:
    """What the requests give undisturbed; asked for once for each daemon."""
    if id(daemon) not in EXPECTED:
        streams = [Stream(daemon, body) for body in bodies()]
        for stream in streams:
            stream.join()
        EXPECTED[id(daemon)] = [tokens_of(stream) for stream in streams]
    return EXPECTED[id(daemon)]


def measure_front_end(daemon: Daemon, row: Row) -> None:
    """Its clients lose their connections; no rank is started again."""
    streams = [Stream(daemon, body) for body in bodies()]
    await_growth(streams, 5)
    pids = [daemon.pid(f"rank-{rank}") for rank in range(daemon.ranks)]
    kill(daemon, "http")
    started = time.monotonic()
    while not is_ready(daemon):
        assert time.monotonic() - started < RECOVERY_S, daemon.log[-3000:]
        time.sleep(0.01)
    row.seconds.append(time.monotonic() - started)
    row.num_open += len(streams)
    row.num_lost += len(streams)
    daemon.assert_at_rest(2)
    assert pids == [daemon.pid(f"rank-{rank}") for rank in range(daemon.ranks)]


def is_ready(daemon: Daemon) -> bool:
    try:
        return httpx.get(f"{daemon.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    words, serve = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--faults", default=",".join([*FAULTS, "http"]))
    given = parser.parse_args(words)
    limits = ("--max-restarts", "100000", "--step-timeout", str(STEP_TIMEOUT_S))
    for num_ranks in map(int, given.ranks.split(",")):
        with Daemon(*limits, *serve, ranks=num_ranks) as daemon:
            daemon.wait_ready(START_S)
            expected_of(daemon)
            print(f"\nDP {num_ranks}, {given.repeats} repeats\n{HEADER}", flush=True)
            for name in given.faults.split(","):
                if name == "http":
                    row = Row("SIGKILL of the front end")
                    for _ in range(given.repeats):
                        measure_front_end(daemon, row)
                    print(row, flush=True)
                    continue
                text, fault, losses = FAULTS[name]
                for victim in range(num_ranks):
                    row = Row(text.format(victim))
                    for _ in range(given.repeats):
                        measure(daemon, row, fault, victim, losses)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
