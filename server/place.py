"""`moed place`: a placement of experts from the load that a running daemon has counted."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moed.config.environ import client_api_key
from moed.config.errors import ConfigError
from moed.config.expert_placement import ExpertPlacement
from moed.dist.balance import balance, imbalance
from moed.server.command_words import CommandParser

EXPERTS_PATH = "/v1/moe/experts"
TIMEOUT_S = 30.0

DESCRIPTION = f"""\
Place experts by their load, for `moed serve --expert-placement FILE`.

SOURCE is the address of a running daemon, such as http://127.0.0.1:8000, or a file with what its
{EXPERTS_PATH} answered. A daemon with API keys takes the one in MOED_API_KEY.
"""


def place(words: Sequence[str]) -> None:
    """Print, or write, the placement. Raises `UsageError` or `ConfigError`."""
    parser = CommandParser("place", DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--ranks", type=int, help="ranks to place on (default: as many as now)")
    parser.add_argument(
        "--copies", type=int, default=0, help="further copies of hot experts (default: 0)"
    )
    parser.add_argument("--window", action="store_true", help="use the last minute's load alone")
    parser.add_argument("--output", metavar="FILE", help="default: standard output")
    given = parser.parse_args(words)
    content = read_load(given.source)
    key = "window_rows" if given.window else "rows"
    text = placement_json(content, key, given.ranks, given.copies, given.source)
    if given.output is None:
        print(text, end="")
        return
    try:
        Path(given.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {given.output}: {error}") from None


def read_load(source: str) -> Any:
    """What `/v1/moe/experts` said. Raises `ConfigError`."""
    is_url = source.startswith(("http://", "https://"))
    try:
        if is_url:
            request = urllib.request.Request(source.rstrip("/") + EXPERTS_PATH)
            if (key := client_api_key()) is not None:
                request.add_header("Authorization", f"Bearer {key}")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        return json.loads(Path(source).read_text(encoding="utf-8"))
    except urllib.error.HTTPError as error:
        hint = "; set MOED_API_KEY" if error.code == 401 else ""
        raise ConfigError(f"{source} answered {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError) as error:
        what = "reach" if is_url else "read"
        raise ConfigError(f"cannot {what} {source}: {error}") from None


def placement_json(
    content: Any, key: str, num_ranks: int | None, num_copies: int, source: str
) -> str:
    """The file's text. Raises `ConfigError` for content that is no load, or sizes that do not
    fit.
    """
    try:
        num_ranks = int(content["num_ranks"]) if num_ranks is None else num_ranks
        loads = {int(layer["layer"]): [int(n) for n in layer[key]] for layer in content["layers"]}
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{source} is not an answer of {EXPERTS_PATH}") from None
    if not any(map(sum, loads.values())):
        raise ConfigError(
            f"{source} has counted no rows yet: place experts after a while of real load"
        )
    placements = {}
    for layer, rows in loads.items():
        try:
            placements[layer] = balance(rows, num_ranks, num_copies)
        except ValueError as error:
            raise ConfigError(f"layer {layer}: {error}") from None
    before = [
        imbalance(rows, ExpertPlacement.linear(len(rows), num_ranks)) for rows in loads.values()
    ]
    after = [imbalance(loads[layer], placed) for layer, placed in placements.items()]
    lines = ",\n".join(
        f'    "{layer}": {json.dumps(placed.held)}' for layer, placed in placements.items()
    )
    head = {
        "num_experts": len(next(iter(loads.values()))),
        "num_ranks": num_ranks,
        "imbalance": {"linear": round(max(before), 4), "placed": round(max(after), 4)},
    }
    return json.dumps(head, indent=2)[:-2] + ',\n  "layers": {\n' + lines + "\n  }\n}\n"
