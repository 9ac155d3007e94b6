"""Progress of loading: a bar where somebody watches a terminal, plain words anywhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def layer_progress(
    total: int, report: Callable[[str], None], rank: int
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of each layer, from 0, before it is loaded.

    `report` gets a line for each; the bar, on stderr, is rank 0's alone.
    """
    console = Console(stderr=True)
    if rank != 0 or not console.is_terminal:
        yield lambda layer: report(f"loading layer {layer + 1} of {total}")
        return
    columns = (TextColumn("loading layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(layer: int) -> None:
            report(f"loading layer {layer + 1} of {total}")
            progress.update(task, completed=layer)

        yield show
        progress.update(task, completed=total)
