"""Load on the daemon: tokens per second, time to first token, inter-token latency.

    python -m tests.benchmarks.serving [--model DIR] [--ranks 1,2] [--clients 1,8,32]

Starts one daemon for each number of ranks, sends closed-loop load (each client sends its next
request when the last has ended; token-id prompts of a fixed length, forced output length), and
prints one row for each number of clients. A failed request is counted, never hidden. Figures of
different machines, or of one noisy machine at different times, do not compare; ratios within one
run do.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import time

import httpx

from tests.daemon import Daemon

START_S = 300.0


@dataclasses.dataclass
class Record:
    """What the clients of one row saw. Times in seconds."""

    first_token_s: list[float] = dataclasses.field(default_factory=list)
    between_tokens_s: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_failed: int = 0
    first_error: str = ""

    def fail(self, error: str) -> None:
        self.num_failed += 1
        self.first_error = self.first_error or error[:300]


def milliseconds(values: list[float], quantile: float) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]:.1f}"


async def ask(
    client: httpx.AsyncClient, url: str, prompt: list[int], output: int, record: Record
) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    stamps: list[float] = []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return record.fail(response.text)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return record.fail(event["error"]["message"])
                if event.get("usage"):
                    record.num_tokens += event["usage"]["completion_tokens"]
                if event["choices"] and event["choices"][0].get("finish_reason") is None:
                    stamps.append(time.perf_counter())
    except httpx.HTTPError as error:
        return record.fail(f"{type(error).__name__}: {error}")
    if not stamps:
        return record.fail("no token came")
    record.first_token_s.append(stamps[0] - start)
    record.between_tokens_s.extend(
        after - before for before, after in zip(stamps, stamps[1:], strict=False)
    )


async def measure(url: str, clients: int, requests: int, args: argparse.Namespace) -> str:
    """One row: `requests` requests by `clients` clients."""
    generator = random.Random(args.seed)
    prompts = [
        [generator.randrange(args.vocab) for _ in range(args.input)] for _ in range(requests)
    ]
    record = Record()
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def worker() -> None:
            while prompts:
                await ask(client, url, prompts.pop(), args.output, record)

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(clients)))
        wall_s = time.perf_counter() - start
    ttft, itl = record.first_token_s, record.between_tokens_s
    row = (
        f"{clients:>7} {record.num_tokens / wall_s:>9.1f} "
        f"{milliseconds(ttft, 0.5):>9} {milliseconds(ttft, 0.99):>9} "
        f"{milliseconds(itl, 0.5):>8} {milliseconds(itl, 0.99):>8} {record.num_failed:>6}"
    )
    return f"{row}  {record.first_error}" if record.first_error else row


def bench(num_ranks: int, args: argparse.Namespace) -> None:
    model = [args.model] if args.model else []
    with Daemon(*model, *args.serve, ranks=num_ranks) as daemon:
        daemon.wait_ready(START_S)
        print(f"\nDP {num_ranks}: {args.input} tokens in, {args.output} out")
        print("clients     tok/s  TTFT p50  TTFT p99  ITL p50  ITL p99 failed   (ms)")
        # The first requests pay for allocator and caches.
        asyncio.run(measure(daemon.url, 2, 4, args))
        for clients in args.clients:
            requests = max(8, 2 * clients)
            print(asyncio.run(measure(daemon.url, clients, requests, args)), flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="checkpoint folder; default: the bundled model")
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--clients", type=numbers, default=[1, 8, 32])
    parser.add_argument("-i", "--input", type=int, default=128)
    parser.add_argument("-o", "--output", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=500, help="prompt ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="after `--`: further flags of `moed serve`")
    args = parser.parse_args()
    for num_ranks in args.ranks:
        bench(num_ranks, args)


if __name__ == "__main__":
    main()
