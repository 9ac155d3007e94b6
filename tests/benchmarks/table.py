"""The speed of the current tree in one table, beside another server where one is given.

    python -m tests.benchmarks.table [--peer EXECUTABLE|URL|COMMAND] [--model mid|wide|bundled|DIR]
        [--rounds 5] [--threads 2] [--only WORDS] [--history [FILE]]

EXECUTABLE is vLLM's; a COMMAND of any other server holds {port}, and {model} if it wants one; what
answers under a URL must serve the same model by itself. Both servers are up at once and take turns,
so a noisy machine meets both alike: only ratios within one run compare. The first round warms up.
A failed request gives no tokens, and is counted. Loads that the model is too short for are left
out. `--history` appends the ratios to FILE, or to history.jsonl beside this file.
"""

import argparse
import asyncio
import datetime
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from moed.config.model import bundled_checkpoint
from moed.server.bench.client import Target, run_load
from moed.server.bench.report import figures
from moed.server.bench.workload import Lengths, Load, Workload
from tests.benchmarks import engine_step, exchange
from tests.benchmarks.checkpoint import SHAPES, write_checkpoint
from tests.benchmarks.peers import Server, start_moed, start_peer
from tests.worker_pool import WorkerPool

HISTORY = Path(__file__).with_name("history.jsonl")
MAX_MODEL_LEN = 4096
NUM_STARTS = 3
MB = 1e6


@dataclass(frozen=True)
class Scenario:
    """One load, and how many times the peer's tokens per second moed must reach."""

    name: str
    num_clients: int
    least_ratio: float
    num_input_tokens: int = 128
    num_output_tokens: int = 64
    num_prefix_tokens: int = 0
    num_ranks: int = 1
    """Of moed; the peer has one."""

    @property
    def num_tokens(self) -> int:
        """Of one request, all together."""
        return self.num_prefix_tokens + self.num_input_tokens + self.num_output_tokens


SCENARIOS = (
    Scenario("1 client", 1, 1.3),
    Scenario("8 clients", 8, 1.1),
    Scenario("32 clients", 32, 1.1),
    Scenario("prefix of 1024, 32 clients", 32, 1.1, num_prefix_tokens=1024),
    Scenario("2048 in, 32 out, 8 clients", 8, 1.1, num_input_tokens=2048, num_output_tokens=32),
    Scenario("DP 2, 8 clients", 8, 0.8, num_ranks=2),
    Scenario("DP 2, 32 clients", 32, 1.0, num_ranks=2),
)
# The load whose first token may not come later than the peer's.
FIRST_TOKEN = "8 clients"
RATE = "output_tokens_per_s"


def measure(url: str, scenario: Scenario, vocab_size: int, part: int) -> dict[str, Any]:
    """One round."""
    workload = Workload(
        Lengths(scenario.num_input_tokens, scenario.num_input_tokens),
        Lengths(scenario.num_output_tokens, scenario.num_output_tokens),
        scenario.num_prefix_tokens,
        vocab_size,
        seed=0,
    )
    asks = workload.asks(max(8, 2 * scenario.num_clients), part)
    load = Load(num_clients=scenario.num_clients)
    return figures(load, asyncio.run(run_load(Target(url, None, None, 600.0, 0.0), load, asks, 0)))


def compare(
    scenario: Scenario, own: str, peer: str | None, vocab_size: int, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rounds of moed, and the peer's, one after the other."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for part in range(rounds + 1):
        turns = [(own, ours)] if peer is None else [(own, ours), (peer, theirs)]
        # In turn the one first and the other.
        for url, rows in turns if part % 2 else turns[::-1]:
            row = measure(url, scenario, vocab_size, part)
            if part:
                rows.append(row)
    return ours, theirs


class Table:
    """Lines as they come, and what goes into the history."""

    def __init__(self) -> None:
        self.kept: dict[str, float] = {}
        print(f"{'':<38} {'moed':>9} {'peer':>9} {'ratio':>7}  must", flush=True)

    def line(
        self, name: str, own: float, peer: float | None, must: str, ratio: float | None = None
    ) -> None:
        ratio = own / peer if ratio is None and peer else ratio
        cells = [f"{own:>9.3g}", f"{'-' if peer is None else format(peer, '.3g'):>9}"]
        cells.append(f"{'-' if ratio is None else format(ratio, '.2f'):>7}")
        print(f"{name:<38} {' '.join(cells)}  {must}", flush=True)
        self.kept[name] = round(own if ratio is None else ratio, 3)


def median_ratio(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], figure: str
) -> tuple[float, float | None, float | None]:
    own, peer = ([value(row, figure) for row in rows] for rows in (ours, theirs))
    if not peer:
        return statistics.median(own), None, None
    # Where nothing came from the peer, anything is infinitely more, and no time can be compared.
    is_rate = figure == RATE
    ratios = [a / b if b else math.inf for a, b in zip(own, peer, strict=True) if b or is_rate]
    ratio = statistics.median(ratios) if ratios else None
    return statistics.median(own), statistics.median(peer), ratio


def value(row: dict[str, Any], figure: str) -> float:
    found = row[figure]
    return float((found["p50"] if isinstance(found, dict) else found) or 0.0)


def loads(table: Table, servers: dict[int, str], peer: str | None, given: "Given") -> None:
    """Every scenario, against the peer where there is one."""
    for scenario in given.scenarios:
        own = servers[scenario.num_ranks]
        ours, theirs = compare(scenario, own, peer, given.vocab_size, given.rounds)
        must = f">= {scenario.least_ratio * given.share:.2f}"
        table.line(
            f"{scenario.name}: tokens/s",
            *median_ratio(ours, theirs, RATE)[:2],
            must,
            median_ratio(ours, theirs, RATE)[2],
        )
        first = median_ratio(ours, theirs, "ttft_ms")
        must = "<= 1.00" if scenario.name == FIRST_TOKEN else ""
        table.line(f"{scenario.name}: first token, ms", first[0], first[1], must, first[2])
        failed = [sum(row["failed"] for row in rows) for rows in (ours, theirs)]
        if any(failed):
            table.line(f"{scenario.name}: failed", failed[0], failed[1], "0", float(failed[0]))


def starts(table: Table, given: "Given") -> None:
    """From the command to ready, one server at a time, in turn."""
    own, theirs = [], []
    for _ in range(NUM_STARTS):
        with given.start_moed(1) as server:
            own.append(server.ready_s)
        if given.peer is not None and not given.is_url:
            with given.start_peer(given.peer) as server:
                theirs.append(server.ready_s)
    peer = statistics.median(theirs) if theirs else None
    table.line("start to ready, s", statistics.median(own), peer, "<= 0.10")


def memory(table: Table, server: Server) -> None:
    """What a rank holds of its own, less its weights; what the loads have used of the KV cache is
    in it.
    """
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    pattern = r'^moed:memory_bytes\{engine="0".*?use="weights"\} (\S+)$'
    weights = sum(map(float, re.findall(pattern, text, re.M)))
    held = [anonymous_bytes(child.pid) for child in psutil.Process(server.process.pid).children()]
    table.line("memory of a rank beyond weights, MB", (max(held) - weights) / MB, None, "< 400")


def anonymous_bytes(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def own_steps(table: Table, vocab_size: int) -> None:
    """moed's own Python, and the ranks' agreement."""
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        parts = engine_step.measure(32, vocab_size, 200, temperature).medians()
        must = "< 1.5" if name == "greedy" else ""
        table.line(f"own step, 32 requests, {name}, ms", sum(parts.values()) / 1e3, None, must)
    parts = engine_step.measure_queue(vocab_size, 200).medians()
    table.line("schedule, 10,000 queued, 256 run, ms", sum(parts.values()) / 1e3, None, "< 2")
    pool = WorkerPool(2)
    try:
        found = pool.run(exchange.measure, 32, 512, 2000)[0]
    finally:
        pool.close()
    took = found["records over shared memory"][0] / 1e3
    table.line("one agreement, 2 ranks, ms", took, None, "< 0.45")


@dataclass(frozen=True)
class Given:
    """What is to be measured."""

    model: str
    vocab_size: int
    peer: str | None
    rounds: int
    num_threads: int
    scenarios: tuple[Scenario, ...]
    share: float
    """Of each ratio that is asked of the mid checkpoint."""
    max_model_len: int

    @property
    def is_url(self) -> bool:
        return self.peer is not None and self.peer.startswith("http")

    def start_moed(self, num_ranks: int) -> Server:
        return start_moed(self.model, num_ranks, self.num_threads, self.max_model_len)

    def start_peer(self, peer: str) -> Server:
        return start_peer(peer, self.model, self.num_threads, self.max_model_len)


def run(given: Given) -> Table:
    if given.peer is None:
        print("without --peer: moed's own figures, and no ratios")
    table = Table()
    own_steps(table, given.vocab_size)
    starts(table, given)
    with ExitStack() as stack:
        sizes = sorted({scenario.num_ranks for scenario in given.scenarios})
        servers = {size: stack.enter_context(given.start_moed(size)) for size in sizes}
        peer = given.peer
        if peer is not None and not given.is_url:
            peer = stack.enter_context(given.start_peer(peer)).url
        loads(table, {size: server.url for size, server in servers.items()}, peer, given)
        if servers:
            memory(table, servers[sizes[-1]])
    return table


def keep(table: Table, given: Given, model: str, history: Path) -> None:
    """Append to `history`: what was measured, where, and of which tree."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {_cpu_name()}",
        "model": model,
        "peer": given.peer and (given.peer if given.is_url else Path(given.peer.split()[0]).name),
        "rounds": given.rounds,
        "figures": table.kept,
    }
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--model", default="mid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="loads whose name holds one of these words")
    parser.add_argument("--history", nargs="?", type=Path, const=HISTORY, metavar="FILE")
    arguments = parser.parse_args()
    # Stopped from outside, the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    words = [word for word in arguments.only.split(",") if word]
    scenarios = tuple(s for s in SCENARIOS if not words or any(word in s.name for word in words))
    if not scenarios:
        names = ", ".join(repr(scenario.name) for scenario in SCENARIOS)
        parser.error(f"--only {arguments.only!r}: no load has such a name; there are {names}")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model in SHAPES:
            write_checkpoint(Path(folder), model)
            model = folder
        elif model == "bundled":
            model = str(bundled_checkpoint())
        config = json.loads((Path(model) / "config.json").read_text())
        max_model_len = min(MAX_MODEL_LEN, config["max_position_embeddings"])
        given = Given(
            model=model,
            vocab_size=config["vocab_size"],
            peer=arguments.peer or None,
            rounds=arguments.rounds,
            num_threads=arguments.threads,
            scenarios=tuple(s for s in scenarios if s.num_tokens <= max_model_len),
            max_model_len=max_model_len,
            share=1.0 if arguments.model == "mid" else 0.9,
        )
        table = run(given)
        if arguments.history is not None:
            keep(table, given, arguments.model, arguments.history)


if __name__ == "__main__":
    main()
