"""How long torchrun waits between SIGTERM and SIGKILL for its workers, and what of that time a
drain may use. Imports no torch.
"""

from collections.abc import Sequence

import psutil

from moed.config.environ import torchrun_patience_variables

# What torchrun takes where nothing is set (torch 2.13).
DEFAULT_PATIENCE_S = 30.0
FLAGS = ("--shutdown-timeout", "--shutdown_timeout")
SHORTEST_ABBREVIATION = len("--shutdown-")
# From the end of the drain to the end of the processes: error events are taken, ranks leave
# together, the front end closes.
LEAVING_S = 4.0


def torchrun_patience_s(own_words: Sequence[str]) -> float:
    """Seconds that torchrun, this process's parent, gives its workers; `own_words`: what this
    process was given, with which the parent's command line ends.
    """
    try:
        parent = psutil.Process().parent()
        command = [] if parent is None else parent.cmdline()
    except psutil.Error:
        command = []
    return patience_s(command[: len(command) - len(own_words)], torchrun_patience_variables())


def patience_s(command: Sequence[str], variables: Sequence[str | None]) -> float:
    """By torchrun's own rules: its flag, else the first variable that is set, else its default."""
    given: str | None = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        flag, has_value, value = word.partition("=")
        # argparse takes a beginning of a flag that is no beginning of another.
        if len(flag) >= SHORTEST_ABBREVIATION and any(name.startswith(flag) for name in FLAGS):
            given = value if has_value else following
    for text in (given, *variables):
        try:
            if text is not None:
                return max(0.0, float(text))
        except ValueError:
            continue
    return DEFAULT_PATIENCE_S


def longest_drain_s(patience_s: float) -> float:
    """What a drain may take, so that all have left by themselves before SIGKILL comes."""
    return max(patience_s - LEAVING_S, patience_s / 2)
