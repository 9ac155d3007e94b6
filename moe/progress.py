"""Progress of loading: a bar where somebody watches a terminal, plain words anywhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def layer_progress(
    total: int, report: Callable[[str], None], rank: int
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of each layer, from 0, before it is loaded.

    `report` gets a line for each; the bar, on stderr, is rank 0's alone.
    """
    if rank != 0 or not sys.stderr.isatty():
        yield lambda layer: report(f"loading layer {layer + 1} of {total}")
        return
    # Slow to import, and needed by one rank at most.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("loading layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(layer: int) -> None:
            report(f"loading layer {layer + 1} of {total}")
            progress.update(task, completed=layer)

        yield show
        progress.update(task, completed=total)
