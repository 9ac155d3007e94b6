"""Which collectives a piece of code calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from moed.dist.host.channel import HostChannel

# What torch.distributed offers for sending anything anywhere.
STARTS = ("all_", "gather", "reduce", "scatter", "broadcast", "barrier", "monitored_barrier")
STARTS_OF_TWO = ("send", "recv", "isend", "irecv", "batch_isend")
COLLECTIVES = [
    name
    for name in dir(dist)
    # "reduce_op" is no function, and warns when touched.
    if name.startswith((*STARTS, *STARTS_OF_TWO)) and name != "reduce_op"
]


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Yields a list that grows by the name of each call."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    original_run = HostChannel.run

    def counted_run(channel: HostChannel, call: Callable[..., int], *args: Any) -> None:
        calls.append("exchange through shared memory")
        original_run(channel, call, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(HostChannel, "run", counted_run))
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counted(name)))
        yield calls
