"""The command line of `moed bench`."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx

from moed.config.environ import client_api_key, openai_api_key
from moed.config.errors import ConfigError, UsageError
from moed.server.bench.client import Seen, Target, run_load
from moed.server.bench.report import HEADER, check_plotting, figures, plot, row_text
from moed.server.bench.workload import Lengths, Load, Workload
from moed.server.command_words import CommandParser

DESCRIPTION = """\
Put load on an OpenAI-compatible server, and print what its clients see.

URL is the server's, such as http://127.0.0.1:8000. Prompts are random token ids and outputs are
forced to their length, so that two servers with the same model get the same work. Compare ratios
within one run, on one machine. A failed request is counted, and makes the exit code 1. A server
with API keys takes the one in MOED_API_KEY or OPENAI_API_KEY.
"""
DEFAULT_CLIENTS = (1, 8, 32)
SMALL_VOCABULARY = 256
# How long a load with a rate goes on by default, in seconds.
RATE_S = 20
EXIT_FAILED_REQUESTS = 1

Value = TypeVar("Value")


def _list_of(convert: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    def parse(text: str) -> list[Value]:
        values = [convert(part) for part in text.split(",")]
        if not all(value > 0 for value in values):  # type: ignore[operator]
            raise ValueError(text)
        return values

    parse.__name__ = "list of numbers above 0"
    return parse


def _parser() -> CommandParser:
    parser = CommandParser("bench", DESCRIPTION)
    add = parser.add_argument
    add("url", metavar="URL")
    add("--model", help="default: the server's own")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument(
        "--clients",
        type=_list_of(int),
        help="closed loop: so many clients that wait for each answer (default: 1,8,32)",
    )
    loads.add_argument(
        "--rates", type=_list_of(float), help="open loop: so many requests a second, at random"
    )
    add("--requests", type=int, help="of each load (default: 2 a client, at least 8; or 20 s)")
    add(
        "-i",
        "--input-tokens",
        type=Lengths.parse,
        default=Lengths(128, 128),
        metavar="N[:M]",
        help="of a prompt's own; N:M draws between the two (default: 128)",
    )
    add(
        "-o",
        "--output-tokens",
        type=Lengths.parse,
        default=Lengths(64, 64),
        metavar="N[:M]",
        help="default: 64",
    )
    add("--prefix-tokens", type=int, default=0, help="before them, shared by all (default: 0)")
    add("--warm-up", type=int, default=4, help="requests before the first load (default: 4)")
    add("--vocab", type=int, help="prompt ids lie below it (default: the server's, or 256)")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds for one request (default: 600)")
    add("--json", metavar="FILE", help="write the figures too")
    add("--plot", metavar="FILE", help="draw latency percentiles against load, as .svg or .png")
    return parser


def bench(words: Sequence[str]) -> int:
    """Returns the exit code. Raises `UsageError` or `ConfigError`."""
    given = _parser().parse_args(words)
    if given.plot is not None:
        check_plotting()
    for name in ("requests", "warm_up", "prefix_tokens", "vocab"):
        value = getattr(given, name)
        if value is not None and value < (name in ("requests", "vocab")):
            raise UsageError(f"moed bench: --{name.replace('_', '-')} is {value}: too small")
    url = given.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"moed bench: URL is {given.url!r}; it begins with http:// or https://")
    key = client_api_key() or openai_api_key()
    target = Target(url, given.model, key, given.timeout, given.temperature)
    vocab_size = given.vocab or _vocab_size(target)
    workload = Workload(
        given.input_tokens, given.output_tokens, given.prefix_tokens, vocab_size, given.seed
    )
    if given.rates:
        loads = [Load(rate=rate) for rate in given.rates]
    else:
        loads = [Load(num_clients=number) for number in given.clients or DEFAULT_CLIENTS]
    rows = []
    if given.warm_up:
        seen = _run(target, Load(num_clients=2), workload, given.warm_up, 0)
        if seen.num_failed == given.warm_up:
            raise ConfigError(f"{url} answers no request: {seen.first_error}")
    print(HEADER)
    for part, load in enumerate(loads, 1):
        most = load.level * (2 if load.rate is None else RATE_S)
        count = given.requests or max(8, int(most))
        rows.append(figures(load, _run(target, load, workload, count, part)))
        print(row_text(rows[-1]), flush=True)
    if given.json is not None:
        _write(given.json, json.dumps({"url": url, "loads": rows}, indent=1) + "\n")
    if given.plot is not None:
        plot(rows, given.plot)
    return EXIT_FAILED_REQUESTS if any(row["failed"] for row in rows) else 0


def _run(target: Target, load: Load, workload: Workload, count: int, part: int) -> Seen:
    asks = workload.asks(count, part)
    return asyncio.run(run_load(target, load, asks, workload.seed + part))


def _vocab_size(target: Target) -> int:
    """As a moed tells it; small for servers that do not. Raises `ConfigError`."""
    try:
        answer = httpx.get(f"{target.url}/tokenizer_info", headers=target.headers, timeout=30)
        size = answer.json().get("vocab_size") if answer.status_code == 200 else None
    except httpx.HTTPError as error:
        raise ConfigError(f"cannot reach {target.url}: {error}") from None
    except ValueError:
        size = None
    return size if isinstance(size, int) and size > 0 else SMALL_VOCABULARY


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
