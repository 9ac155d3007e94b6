"""Results that are not there yet: garbage until somebody waits for them.

On a GPU a result that is read too early holds old bytes, sometimes the right ones. Here it holds
values that spoil everything they touch.
"""

from collections.abc import Callable
from typing import Any

import torch


def garbage(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A new tensor of NaN, or of the lowest integer."""
    return fill_with_garbage(torch.empty(shape, dtype=dtype, device=device))


def fill_with_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, overwritten."""
    if tensor.dtype == torch.float8_e4m3fn:
        # torch cannot fill 8-bit floats; this is the pattern of their NaN.
        tensor.view(torch.uint8).fill_(0x7F)
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


class Delivery:
    """Fills the results of one call, once. Lets go of what it holds when it has."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill: Callable[[], None] | None = fill

    @property
    def is_done(self) -> bool:
        return self._fill is None

    def deliver(self) -> None:
        """Safe to call twice."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill()


class EventHandle:
    """A point in time of a call; made without a delivery it has passed already."""

    def __init__(self, delivery: Delivery | None = None) -> None:
        self._delivery = delivery

    def current_stream_wait(self) -> None:
        """Results of the call can be read afterwards."""
        if self._delivery is not None:
            self._delivery.deliver()


class EventOverlap:
    """DeepEP's wrapper around an event; `event` is None where there is nothing to wait for."""

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Raises AssertionError when the call was not asynchronous."""
        assert self.event is not None
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.event is not None:
            self.current_stream_wait()


def finish(delivery: Delivery, is_asynchronous: bool) -> EventOverlap:
    """Deliver now, or when the returned event is waited for."""
    if is_asynchronous:
        return EventOverlap(EventHandle(delivery))
    delivery.deliver()
    return EventOverlap()
