"""The attention half of a decoder layer in one call of the native kernels.

Legend: T tokens, D hidden, H query heads, G KV heads, d head dim.
"""

import ctypes
from dataclasses import dataclass

import torch

from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache
from moed.moe.native.binding import DTYPES, AttentionLayer, Library, StepState, arguments
from moed.moe.native.matrix import NativeMatrix
from moed.moe.native.packing import LANES
from moed.moe.rotary import Tables


@dataclass(frozen=True)
class HeadSizes:
    """Of one layer, and how its heads are treated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int
    is_interleaved: bool
    norm_after_rotary: bool
    window: int | None
    """Of the last tokens that a token sees."""
    eps: float
    scale: float
    """Of the scores."""
    residual_scale: float


class NativeStep:
    """What all layers with the same blocks share in one step: made once, and kept until the last of
    them has run.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        tables: Tables,
        block_size: int,
        query_size: int,
    ) -> None:
        """`batch` has the slots and tables of these layers; `query_size` is H d."""
        cosine, sine = tables
        query = cosine.new_empty(batch.num_tokens, query_size)
        attended = torch.empty_like(query)
        pieces, row = [], 0
        for request, num_tokens in enumerate(batch.query_lens):
            if num_tokens:
                pieces.append((row, num_tokens, request))
            row += num_tokens
        piece_rows = torch.tensor(pieces, dtype=torch.int64)
        blocks = batch.block_tables.contiguous()
        self._kept = (batch, cosine, sine, query, attended, piece_rows, blocks)
        struct = StepState(
            batch.num_tokens,
            block_size,
            blocks.shape[1],
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            len(pieces),
            piece_rows.data_ptr(),
            blocks.data_ptr(),
        )
        self._struct = struct
        self.address = ctypes.addressof(struct)
        self.pointers = query.data_ptr(), attended.data_ptr()


class NativeAttention:
    """Norm, projections, rotation, the cache, attention and the residual of one layer."""

    def __init__(
        self,
        library: Library,
        qkv: NativeMatrix,
        output: NativeMatrix,
        input_norm: torch.Tensor,
        head_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
        sizes: HeadSizes,
    ) -> None:
        """`input_norm` [D], `head_norm` [H + G, d], `sinks` [H], all in the dtype of `qkv`."""
        self._function = library.attention
        self._dtype = qkv.dtype
        norms = (input_norm, head_norm, sinks)
        kept = [None if t is None else t.to(qkv.dtype).contiguous() for t in norms]
        self._kept = (qkv, output, kept)
        self._layer = AttentionLayer(
            qkv.struct,
            output.struct,
            *(None if tensor is None else tensor.data_ptr() for tensor in kept),
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.num_rotated,
            sizes.is_interleaved,
            sizes.norm_after_rotary,
            sizes.window or 0,
            sizes.eps,
            sizes.scale,
            sizes.residual_scale,
        )
        self._address = ctypes.addressof(self._layer)

    def add_to(
        self,
        hidden: torch.Tensor,
        index: int,
        step: NativeStep,
        cache: KVCache,
    ) -> None:
        """Add to `hidden` [T, D] what layer `index` attends to; its K and V go to the cache."""
        assert hidden.is_contiguous() and hidden.dtype == self._dtype
        self._function(
            arguments(self._dtype),
            self._address,
            step.address,
            hidden.data_ptr(),
            *step.pointers,
            cache.keys[index].data_ptr(),
            cache.values[index].data_ptr(),
        )


def can_attend(qkv: NativeMatrix | None, output: NativeMatrix | None, head_dim: int) -> bool:
    """Whether there are kernels for such projections and heads."""
    return (
        qkv is not None
        and output is not None
        and qkv.dtype == output.dtype
        and qkv.dtype in DTYPES
        and head_dim % LANES == 0
    )
