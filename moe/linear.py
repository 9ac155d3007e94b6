"""Matrix products with weights that never change: laid out once as the processor reads them best.

Legend: n rows, D input size, N output size.
"""

import torch
import torch.nn.functional as F

from moed.moe import native
from moed.moe.native.matrix import NativeMatrix
from moed.moe.native.packing import can_pack as can_pack_natively

# Only steers which layout oneDNN prefers; any number of rows can be multiplied.
TYPICAL_ROWS = 16


class Linear:
    """`x W^T + b`. On a CPU the weights lie as the native kernels read them; without these, in 16
    bits, in oneDNN's blocked layout, which is read half again as fast as rows; otherwise as they
    are.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [N, D]; `bias` [N] or None."""
        self.out_features = weight.shape[0]
        self.native: NativeMatrix | None = None
        self._weight, self._bias, self._is_packed = weight, bias, False
        library = native.library()
        if library is not None and can_pack_natively(weight):
            self.native = NativeMatrix(library, weight, bias)
            # Held once, in the other layout.
            self._weight = weight.new_empty(0)
        elif can_pack(weight):
            self._is_packed = True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, N] for `rows` [n, D]."""
        if self.native is not None:
            return self.native(rows)
        if not self._is_packed:
            return F.linear(rows, self._weight, self._bias)
        if not rows.shape[0]:
            return rows.new_empty(0, self.out_features)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product


def can_pack(weight: torch.Tensor) -> bool:
    """True where oneDNN has kernels for this dtype on this CPU."""
    if weight.device.type != "cpu" or not weight.numel():
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return bool(operators._is_mkldnn_fp16_supported())


def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` over the first dim. On the meta device, where a survey runs, `torch.cat` itself
    would import torch's compiler, which takes seconds.
    """
    first = parts[0]
    joined = first.new_empty((sum(part.shape[0] for part in parts), *first.shape[1:]))
    start = 0
    for part in parts:
        joined[start : start + part.shape[0]] = part
        start += part.shape[0]
    return joined
