"""One packed weight, and its product.

Legend: n rows, D input size, N output size.
"""

import ctypes

import torch

from moed.moe.native.binding import Library, Matrix, arguments
from moed.moe.native.packing import pack


class NativeMatrix:
    """`x W^T + b`."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [N, D], see `can_pack`; `bias` [N] of the same dtype, or None."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._packed = pack(library, weight)
        self._bias = None if bias is None else bias.contiguous()
        self._function = library.linear
        self.struct = Matrix(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
        )
        self._address = ctypes.addressof(self.struct)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, N] for `rows` [n, D]."""
        assert rows.dtype == self.dtype and rows.shape[1] == self.in_features
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        self._function(
            arguments(self.dtype), self._address, rows.data_ptr(), rows.shape[0], out.data_ptr()
        )
        return out
