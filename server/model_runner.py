"""From the scheduler's choice to logits: builds the batch and runs the model, nothing else.

Legend: T tokens, R requests, P the most blocks any holds, J rows of logits.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from moed.config.graphs import EAGER, GraphShape
from moed.dist.dp_metadata import DPMetadata
from moed.moe.attention import GraphAttention
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache, LatentCache
from moed.server.host_copy import on_device
from moed.server.request import Request
from moed.server.scheduler import Schedule


class Model(Protocol):
    """What the runner needs of `moed.moe.model.Decoder`."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The M decoder layers that have experts."""
        ...

    @property
    def moe_rows(self) -> torch.Tensor:
        """[M, e] int64, on the device: pairs that this rank's experts have computed, by slot."""
        ...

    def graph_attention(
        self, num_rows: int, num_blocks: int, block_size: int
    ) -> GraphAttention | None:
        """What attention needs done before each replay of a graph; None: nothing."""
        ...

    def routing_record(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, M, K] int32, to be filled with the chosen experts."""
        ...

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache | LatentCache, dp_metadata: DPMetadata
    ) -> torch.Tensor:
        """Logits [J, V] float32."""
        ...


class Runner(Protocol):
    """What the loops need: the plain runner, or one with graphs."""

    @property
    def model(self) -> Model: ...

    def batch(self, schedule: Schedule, chosen: torch.Tensor | None = None) -> ForwardBatch:
        """The tensors of a step. `chosen` [R] int64, on the device: what the step before has
        chosen, where some of its requests await it.
        """
        ...

    def graph_for(self, batch: ForwardBatch) -> GraphShape:
        """The graph that this rank could replay for `batch`, or `EAGER`; told in the agreement."""
        ...

    def run(self, batch: ForwardBatch, dp_metadata: DPMetadata, graph: GraphShape) -> torch.Tensor:
        """Logits [J, V] float32. Every rank calls it in the same steps, with or without tokens, and
        with the `graph` that was agreed on.
        """
        ...


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def make_batch(
    schedule: Schedule, block_size: int, has_window_blocks: bool, device: torch.device
) -> ForwardBatch:
    """The step's tensors, built in numpy and moved once each. Legal for a step without work.
    `has_window_blocks`: the layers that slide have blocks of their own.
    """
    requests = [scheduled.request for scheduled in schedule.requests]
    query_lens = [scheduled.num_tokens for scheduled in schedule.requests]
    starts = [request.num_computed_tokens for request in requests]
    width = max((len(r.block_ids) for r in requests), default=0)
    block_tables = _tables([request.block_ids for request in requests], width)
    token_ids = np.fromiter(
        chain.from_iterable(
            _known_tokens(request, start, count)
            for request, start, count in zip(requests, starts, query_lens, strict=True)
        ),
        dtype=np.int64,
        count=schedule.num_tokens,
    )
    # First row of each request, and each row's request.
    offsets = np.cumsum([0, *query_lens], dtype=np.int64)[:-1]
    owners = np.repeat(np.arange(len(requests)), np.asarray(query_lens, dtype=np.int64))
    shifts = np.asarray(starts, dtype=np.int64) - offsets
    positions = np.arange(schedule.num_tokens) + shifts[owners]
    logits_rows = [
        position - shift
        for scheduled, shift in zip(schedule.requests, shifts.tolist(), strict=True)
        for position in scheduled.logits_positions
    ]

    def slots(tables: Integers) -> Integers:
        blocks = tables[owners, positions // block_size]
        found: Integers = blocks * block_size + positions % block_size
        return found

    def tensor(values: Integers) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    window_slots = window_tables = None
    if has_window_blocks:
        tables = _tables([request.window_block_ids for request in requests], width)
        window_slots, window_tables = tensor(slots(tables)), tensor(tables)
    return ForwardBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots(block_tables)),
        query_lens=tuple(query_lens),
        context_lens=tuple(a + b for a, b in zip(starts, query_lens, strict=True)),
        block_tables=tensor(block_tables),
        logits_indices=tensor(np.asarray(logits_rows, dtype=np.int64)),
        window_slot_mapping=window_slots,
        window_block_tables=window_tables,
    )


def _known_tokens(request: Request, start: int, count: int) -> list[int]:
    """The one that is awaited is 0."""
    known = request.token_ids[start : start + count]
    return known if len(known) == count else [*known, 0]


def fill_awaited(batch: ForwardBatch, schedule: Schedule, chosen: torch.Tensor) -> None:
    """Put the tokens that only the device knows in their rows; see `Runner.batch`."""
    rows, places, end = [], [], 0
    for scheduled in schedule.requests:
        request, end = scheduled.request, end + scheduled.num_tokens
        if request.awaited_place is not None and scheduled.samples:
            rows.append(end - 1)
            places.append(request.awaited_place)
    if rows:
        found = chosen[on_device(places, chosen)]
        batch.token_ids.index_copy_(0, on_device(rows, chosen), found)


def _tables(block_ids: "Sequence[array[int]]", width: int) -> Integers:
    """[R, width], rows padded with 0."""
    tables = np.zeros((len(block_ids), width), dtype=np.int64)
    for row, own in enumerate(block_ids):
        tables[row, : len(own)] = np.frombuffer(own, np.int64)
    return tables


class ModelRunner:
    """The model and its KV cache on one rank: a `Runner` for which every step is eager."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache | LatentCache,
        block_size: int,
        device: torch.device,
        *,
        has_window_blocks: bool = False,
    ) -> None:
        """`has_window_blocks`: the layers that slide have blocks of their own."""
        self._has_window_blocks = has_window_blocks
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._device = device

    @property
    def model(self) -> Model:
        """See `Runner`."""
        return self._model

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""
        return self._block_size

    def batch(self, schedule: Schedule, chosen: torch.Tensor | None = None) -> ForwardBatch:
        """See `Runner`."""
        batch = make_batch(schedule, self._block_size, self._has_window_blocks, self._device)
        if chosen is not None:
            fill_awaited(batch, schedule, chosen)
        if any(s.request.params.return_routed_experts for s in schedule.requests):
            return replace(batch, routed_experts=self._model.routing_record(schedule.num_tokens))
        return batch

    def graph_for(self, batch: ForwardBatch) -> GraphShape:
        """See `Runner`."""
        return EAGER

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, dp_metadata: DPMetadata, graph: GraphShape) -> torch.Tensor:
        """See `Runner`."""
        assert graph == EAGER, "there are no graphs here"
        return self._model.forward(batch, self._kv_cache, dp_metadata)
