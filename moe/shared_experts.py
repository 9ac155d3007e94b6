"""Experts that every token passes, computed where the token is, while rows travel.

Legend: n rows, D hidden, I intermediate size of all shared experts together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moed.moe.experts import swiglu


@dataclass
class SharedExperts:
    """Weights of one layer's shared experts, as one MLP."""

    gate_up: torch.Tensor
    """[2I, D]."""
    down: torch.Tensor
    """[D, I]."""
    gate: torch.Tensor | None
    """[1, D]: the output is scaled by the sigmoid of this product; None: it is not."""

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] for `hidden` [n, D]."""
        output = swiglu(hidden, self.gate_up, self.down)
        if self.gate is not None:
            output = output * torch.sigmoid(F.linear(hidden, self.gate))
        return output


class SharedRun:
    """The shared experts of one step: begun before dispatch, taken after combine.

    On a GPU they run on a stream of their own meanwhile; on a CPU they run at once.
    """

    def __init__(
        self, shared: SharedExperts, hidden: torch.Tensor, stream: "torch.cuda.Stream | None"
    ) -> None:
        self._stream = stream
        if stream is None:
            self._output = shared.compute(hidden)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._output = shared.compute(hidden)
        # The allocator must not give the rows away while the other stream still reads them.
        hidden.record_stream(stream)

    def add_to(self, combined: torch.Tensor) -> torch.Tensor:
        """`combined` [n, D] plus the shared experts' output: the one place where it is added."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._output.record_stream(torch.cuda.current_stream())
        return combined + self._output
