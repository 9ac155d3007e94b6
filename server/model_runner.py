"""From the scheduler's choice to logits: builds the batch and runs the model, nothing else.

Legend: T tokens, R requests, P the most blocks any holds, J rows of logits.
"""

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

    def forget_moe_rows(self) -> None:
        """Count from 0 again."""
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

    def batch(self, schedule: Schedule) -> ForwardBatch:
        """The tensors of a step."""
        ...

    def graph_for(self, batch: ForwardBatch) -> GraphShape:
        """The graph that this rank could replay for `batch`, or `EAGER`; told in the agreement."""
        ...

    def run(self, batch: ForwardBatch, dp_metadata: DPMetadata, graph: GraphShape) -> torch.Tensor:
        """Logits [J, V] float32. Every rank calls it in the same steps, with or without tokens, and
        with the `graph` that was agreed on.
        """
        ...


def make_batch(schedule: Schedule, block_size: int, device: torch.device) -> ForwardBatch:
    """The step's tensors, built in numpy and moved once each. Legal for a step without work."""
    requests = [scheduled.request for scheduled in schedule.requests]
    query_lens = [scheduled.num_tokens for scheduled in schedule.requests]
    starts = [request.num_computed_tokens for request in requests]
    block_tables = np.zeros(
        (len(requests), max((len(r.block_ids) for r in requests), default=0)), dtype=np.int64
    )
    for row, request in enumerate(requests):
        block_tables[row, : len(request.block_ids)] = np.frombuffer(request.block_ids, np.int64)
    token_ids = np.fromiter(
        chain.from_iterable(
            request.token_ids[start : start + count]
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
    slots = block_tables[owners, positions // block_size] * block_size + positions % block_size
    logits_rows = [
        position - shift
        for scheduled, shift in zip(schedule.requests, shifts.tolist(), strict=True)
        for position in scheduled.logits_positions
    ]

    def tensor(values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        query_lens=tuple(query_lens),
        context_lens=tuple(a + b for a, b in zip(starts, query_lens, strict=True)),
        block_tables=tensor(block_tables),
        logits_indices=tensor(np.asarray(logits_rows, dtype=np.int64)),
    )


class ModelRunner:
    """The model and its KV cache on one rank: a `Runner` for which every step is eager."""

    def __init__(
        self, model: Model, kv_cache: KVCache | LatentCache, block_size: int, device: torch.device
    ) -> None:
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

    def batch(self, schedule: Schedule) -> ForwardBatch:
        """See `Runner`."""
        batch = make_batch(schedule, self._block_size, self._device)
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
