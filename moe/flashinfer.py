"""Attention over the paged cache through FlashInfer's wrappers, on GPUs.

A wrapper is planned on the host, once for a step and a window, and then run by each layer. A graph
has wrappers of its own, for a fixed number of requests, whose plans lie in fixed memory: they are
planned anew before each replay, outside of the graph.

Legend: T tokens, R requests, P blocks of a request, H query heads, G KV heads, d head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moed.config.attention import WORKSPACE_BYTES
from moed.config.windows import Window
from moed.moe.attention import StepAttention
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache

# Blocks as [block size, G, d], as they lie in `KVCache`.
LAYOUT = "NHD"
# For one token of each request: it takes any number of query heads for a KV head, also in graphs.
DECODE_KERNELS = "fa2"
WHOLE_CONTEXT = -1


@dataclass(frozen=True)
class AttentionSizes:
    """Of one process."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Of the scores."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Pages:
    """The blocks of several requests, one request after the other."""

    starts: torch.Tensor
    """[R + 1] int32, on the CPU: where each request's blocks begin."""
    blocks: torch.Tensor
    """int32, on the device."""
    last_lens: torch.Tensor
    """[R] int32, on the CPU: tokens in each request's last block, at least 1."""


def pages_of(block_tables: torch.Tensor, contexts: Sequence[int], block_size: int) -> Pages:
    """Of requests with `contexts` [R] tokens and `block_tables` [R, P]; waits for nothing."""
    lengths = torch.tensor(contexts, dtype=torch.int32)
    counts = (lengths + block_size - 1) // block_size
    starts = torch.zeros(len(contexts) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    owners = torch.repeat_interleave(torch.arange(len(contexts)), counts)
    places = torch.arange(len(owners)) - starts[owners] + owners * block_tables.shape[1]
    on_device = places.to(block_tables.device, non_blocking=True)
    blocks = block_tables.flatten()[on_device].int()
    return Pages(starts, blocks, lengths - (counts - 1) * block_size)


@dataclass(frozen=True)
class FlashInferPlan:
    """A `StepAttention`: a wrapper that is planned for a step's requests."""

    wrapper: Any
    """None for a step without tokens, in which no layer asks."""
    scale: float

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        kv_cache: KVCache,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `StepAttention`."""
        assert sinks is None and scale == self.scale
        cached = (kv_cache.keys[layer], kv_cache.values[layer])
        attended: torch.Tensor = self.wrapper.run(query.contiguous(), cached)
        return attended


class FlashInfer:
    """An `AttentionBackend` for K and V heads without sinks, in 16 bits."""

    copies_context = False

    def __init__(self, package: Any, sizes: AttentionSizes, device: torch.device) -> None:
        """`package` is the module `flashinfer`."""
        self._package = package
        self._sizes = sizes
        self._device = device
        # One for all wrappers, as they run one after the other. Zeros: counters lie in it.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefills: dict[Window | None, Any] = {}
        self._decodes: dict[Window | None, Any] = {}

    def plan(
        self, batch: ForwardBatch, block_size: int, window: Window | None, dtype: torch.dtype
    ) -> FlashInferPlan:
        """See `AttentionBackend`: requests of several tokens and of one go together, unless all
        have one.
        """
        assert dtype == self._sizes.dtype
        if not batch.num_tokens:
            return FlashInferPlan(None, self._sizes.scale)
        present = [request for request, count in enumerate(batch.query_lens) if count]
        query_lens = [batch.query_lens[request] for request in present]
        contexts = [batch.context_lens[request] for request in present]
        tables = batch.block_tables
        if len(present) < tables.shape[0]:
            tables = tables[present]
        pages = pages_of(tables, contexts, block_size)
        if all(count == 1 for count in query_lens):
            wrapper = self._decode_wrapper(window)
            self.plan_decodes(wrapper, pages, block_size, window)
        else:
            wrapper = self._prefill_wrapper(window)
            self._plan_prefills(wrapper, query_lens, pages, block_size, window)
        return FlashInferPlan(wrapper, self._sizes.scale)

    def graph(
        self,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[Window | None, Window | None],
    ) -> "FlashInferGraph":
        """See `AttentionBackend`."""
        wrappers = {
            window: self._graph_wrapper(num_rows, num_blocks) for window in dict.fromkeys(windows)
        }
        return FlashInferGraph(self, wrappers, windows, block_size, self._sizes.scale)

    def plan_decodes(
        self, wrapper: Any, pages: Pages, block_size: int, window: Window | None
    ) -> None:
        """For one token of each request; the host alone takes part, and copies to the device."""
        sizes = self._sizes
        wrapper.plan(
            pages.starts,
            pages.blocks,
            pages.last_lens,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            block_size,
            window_left=_window_left(window),
            q_data_type=sizes.dtype,
            kv_data_type=sizes.dtype,
            sm_scale=sizes.scale,
        )

    def _plan_prefills(
        self,
        wrapper: Any,
        query_lens: Sequence[int],
        pages: Pages,
        block_size: int,
        window: Window | None,
    ) -> None:
        sizes = self._sizes
        first_rows = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        first_rows[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        # The last query of a request sees all of its context.
        wrapper.plan(
            first_rows,
            pages.starts,
            pages.blocks,
            pages.last_lens,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            block_size,
            causal=True,
            window_left=_window_left(window),
            q_data_type=sizes.dtype,
            kv_data_type=sizes.dtype,
            sm_scale=sizes.scale,
        )

    def _prefill_wrapper(self, window: Window | None) -> Any:
        if window not in self._prefills:
            make = self._package.BatchPrefillWithPagedKVCacheWrapper
            self._prefills[window] = make(self._workspace, LAYOUT)
        return self._prefills[window]

    def _decode_wrapper(self, window: Window | None) -> Any:
        if window not in self._decodes:
            make = self._package.BatchDecodeWithPagedKVCacheWrapper
            self._decodes[window] = make(
                self._workspace, LAYOUT, use_tensor_cores=True, backend=DECODE_KERNELS
            )
        return self._decodes[window]

    def _graph_wrapper(self, num_rows: int, num_blocks: int) -> Any:
        def memory(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=memory(num_rows + 1),
            paged_kv_indices_buffer=memory(num_rows * num_blocks),
            paged_kv_last_page_len_buffer=memory(num_rows),
            backend=DECODE_KERNELS,
        )


class FlashInferGraph:
    """A `GraphAttention`."""

    def __init__(
        self,
        backend: FlashInfer,
        wrappers: dict[Window | None, Any],
        windows: tuple[Window | None, Window | None],
        block_size: int,
        scale: float,
    ) -> None:
        self._backend = backend
        self._wrappers = wrappers
        self._block_size = block_size
        whole, sliding = (FlashInferPlan(wrappers[window], scale) for window in windows)
        self.plans: tuple[StepAttention, StepAttention] = (whole, sliding)

    def prepare(self, block_tables: torch.Tensor, contexts: Sequence[int]) -> None:
        """See `GraphAttention`."""
        pages = pages_of(block_tables, contexts, self._block_size)
        for window, wrapper in self._wrappers.items():
            self._backend.plan_decodes(wrapper, pages, self._block_size, window)


def _window_left(window: Window | None) -> int:
    """Tokens before a token that it sees."""
    if window is None:
        return WHOLE_CONTEXT
    assert not window.is_aligned, "aligned windows are torch's"
    return window.size - 1
