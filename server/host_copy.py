"""Small tensors between the host and the device, without waiting for what the device computes."""

from collections.abc import Sequence

import torch


class HostCopy:
    """What a tensor holds by now in the device's order of work, on its way to the host. A tensor of
    the CPU is itself.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_complete(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def on_device(
    values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """[n], where `like` is. `torch.tensor(..., device=...)` would wait for a GPU."""
    return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)
