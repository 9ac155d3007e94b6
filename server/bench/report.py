"""What was seen, as a table, as JSON, and as a plot."""

from collections.abc import Sequence
from typing import Any

from moed.config.errors import ConfigError
from moed.server.bench.client import Seen
from moed.server.bench.workload import Load

QUANTILES = (0.5, 0.9, 0.99)
TIMES = ("ttft_ms", "itl_ms", "e2e_ms")


def figures(load: Load, seen: Seen) -> dict[str, Any]:
    """One row. Times in milliseconds; None where nothing was seen."""
    rate = seen.num_output_tokens / seen.wall_s
    return {
        "load": load.name,
        "level": load.level,
        "requests": len(seen.whole_s) + seen.num_failed,
        "failed": seen.num_failed,
        "first_error": seen.first_error or None,
        "most_open": seen.most_open,
        "duration_s": round(seen.wall_s, 3),
        "output_tokens_per_s": round(rate, 1),
        "total_tokens_per_s": round(rate + seen.num_prompt_tokens / seen.wall_s, 1),
        "ttft_ms": _percentiles(seen.first_token_s),
        "itl_ms": _percentiles(seen.between_tokens_s),
        "e2e_ms": _percentiles(seen.whole_s),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        f"p{round(100 * quantile)}": round(
            1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))], 2
        )
        if ordered
        else None
        for quantile in QUANTILES
    }


HEADER = (
    f"{'load':>12} {'tok/s':>8} {'all/s':>8}"
    f" {'TTFT p50':>9} {'p99':>8} {'ITL p50':>8} {'p99':>8} {'E2E p50':>9} {'p99':>9} {'failed':>6}"
    "  (ms)"
)


def row_text(row: dict[str, Any]) -> str:
    cells = [f"{row['load']:>12} {row['output_tokens_per_s']:>8} {row['total_tokens_per_s']:>8}"]
    for name, widths in zip(TIMES, ((9, 8), (8, 8), (9, 9)), strict=True):
        for quantile, width in zip(("p50", "p99"), widths, strict=True):
            value = row[name][quantile]
            cells.append(f"{'-' if value is None else format(value, '.1f'):>{width}}")
    cells.append(f"{row['failed']:>6}")
    if row["first_error"]:
        cells.append(f" {row['first_error']}")
    return " ".join(cells)


def check_plotting() -> None:
    """Raises `ConfigError` where nothing can draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs the package matplotlib, which is not installed: pip install 'moed[plot]'"
        ) from None


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Percentiles against load, one panel for each time. Raises `ConfigError`."""
    from matplotlib.figure import Figure

    levels = [row["level"] for row in rows]
    unit = "requests a second" if "/s" in rows[0]["load"] else "clients"
    figure = Figure(figsize=(12, 4), layout="constrained")
    titles = ("time to first token", "between tokens", "whole request")
    for panel, name, title in zip(figure.subplots(1, len(TIMES)), TIMES, titles, strict=True):
        for quantile in rows[0][name]:
            panel.plot(levels, [row[name][quantile] for row in rows], marker="o", label=quantile)
        panel.set(title=title, xlabel=unit, ylabel="ms")
        panel.set_ylim(bottom=0)
        panel.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from None
