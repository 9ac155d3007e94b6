"""The workers that torchrun has started on this node, of which this process is one. Imports no
torch.
"""

from collections.abc import Sequence

import psutil


def a_worker_has_ended(num_workers: int) -> bool:
    """Whether one of the `num_workers` of this node has: torchrun then sends SIGTERM to the others,
    which does not mean that anybody asked it to stop.
    """
    own = psutil.Process()
    command, agent = own.cmdline(), own.parent()
    if agent is None:
        return False
    return sum(_command(child) == command for child in agent.children()) < num_workers


def _command(process: psutil.Process) -> Sequence[str]:
    """Empty for one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return ()
