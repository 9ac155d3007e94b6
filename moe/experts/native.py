"""All experts of a layer in one call of the native kernels, on rows in the standard format.

Legend: r rows, D hidden, K top-k, e local experts, I intermediate size.
"""

import ctypes
from typing import ClassVar

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts.base import ExpertWeights
from moed.moe.native.binding import ExpertLayer, Library, arguments
from moed.moe.native.packing import can_pack, can_pack_like, empty_packed, pack_into, padded


def obstacle(weights: ExpertWeights) -> str | None:
    """Why the kernels cannot compute with `weights`, in words."""
    if not weights.is_plain_swiglu:
        return "the native kernels know no biases of experts and no activation but SwiGLU"
    if not can_pack(weights.gate_up.values) or not can_pack(weights.down.values):
        return "the native kernels take float32, or bfloat16 with even sizes"
    return None


def can_fill(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    """Whether there are kernels for plain SwiGLU experts of `sizes`: e, D and I."""
    num_experts, hidden_size, size = sizes
    return num_experts > 0 and all(
        inputs > 0 and can_pack_like(device, dtype, inputs) for inputs in (hidden_size, size)
    )


class NativeExperts:
    """Cost follows the rows: only the weights of experts with rows are read, each once for up to 96
    of them.
    """

    reads_on_host: ClassVar[bool] = True

    def __init__(
        self, library: Library, num_experts: int, hidden_size: int, size: int, dtype: torch.dtype
    ) -> None:
        """Weights without an `obstacle` are to be `put` for every expert."""
        self._library, self._function = library, library.experts
        # Groups of gate and of up in turn.
        self._gate_up = empty_packed((num_experts,), 2 * padded(size), hidden_size, dtype)
        self._down = empty_packed((num_experts,), hidden_size, size, dtype)
        self._dtype, self._num_experts = self._down.dtype, num_experts
        self.rows_per_slot = torch.zeros(num_experts, dtype=torch.int64)
        self._layer = ExpertLayer(
            self._gate_up.data_ptr(),
            self._down.data_ptr(),
            num_experts,
            hidden_size,
            size,
            self.rows_per_slot.data_ptr(),
        )
        self._address = ctypes.addressof(self._layer)

    @classmethod
    def of(cls, library: Library, weights: ExpertWeights) -> "NativeExperts":
        """A copy of `weights` without an `obstacle`."""
        num_experts, hidden_size, size = weights.down.values.shape
        made = cls(library, num_experts, hidden_size, size, weights.down.values.dtype)
        for expert, gate_up in enumerate(weights.gate_up.values):
            made.put(expert, gate_up[:size], gate_up[size:], weights.down.values[expert])
        return made

    def put(self, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Take the weights of `expert`: `gate` and `up` [I, D], `down` [D, I]."""
        pack_into(self._library, gate, self._gate_up[expert, 0::2])
        pack_into(self._library, up, self._gate_up[expert, 1::2])
        pack_into(self._library, down, self._down[expert])

    def __call__(self, dispatched: Dispatched, apply_weights: bool) -> torch.Tensor:
        """[r, D]: for each row the sum over its choices that live here."""
        hidden, ids = dispatched.hidden.contiguous(), dispatched.expert_ids
        weights = dispatched.expert_weights
        assert ids is not None and weights is not None and ids.dtype == torch.int64
        assert hidden.dtype == self._dtype
        # Held until the call is over.
        ids, weights = ids.contiguous(), weights.contiguous()
        output = torch.empty_like(hidden)
        self._function(
            arguments(self._dtype),
            self._address,
            hidden.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr() if apply_weights else None,
            *ids.shape,
            output.data_ptr(),
        )
        return output
