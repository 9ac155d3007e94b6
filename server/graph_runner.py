"""Decode steps as graphs, beside the plain runner, which still runs all other steps.

Which graph is replayed follows from the agreed records and from the recorded shapes, which are the
same on all ranks. A rank without tokens replays it with rows that all only fill up: so all ranks
make the same collectives.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from moed.config.engine_config import ParallelConfig
from moed.config.graphs import EAGER, GraphShape, smallest
from moed.dist.dp_metadata import DPMetadata
from moed.moe.attention import GraphAttention
from moed.moe.batch import ForwardBatch
from moed.server.graph_inputs import GraphInputs
from moed.server.graphs import Recorded, Recorder
from moed.server.model_runner import Model, ModelRunner
from moed.server.scheduler import Schedule

logger = logging.getLogger(__name__)


class GraphRunner:
    """A `Runner` that records `shapes`, largest first, when it is made: collective."""

    def __init__(
        self,
        eager: ModelRunner,
        shapes: Sequence[GraphShape],
        inputs: GraphInputs,
        recorder: Recorder,
        parallel: ParallelConfig,
        data_parallel_rank: int,
    ) -> None:
        """`inputs` are those of `shapes`."""
        self._eager = eager
        self._inputs = inputs
        started = time.monotonic()
        self._graphs: dict[GraphShape, Recorded] = {}
        self._attention: dict[GraphShape, GraphAttention] = {}
        for shape in shapes:
            metadata = DPMetadata.of_graph(
                parallel, shape.num_rows, inputs.padding(shape), rank=data_parallel_rank
            )
            self._graphs[shape] = self._record(shape, metadata, recorder)
        logger.info(
            "recorded %d graphs for decode steps of up to %d requests in %.1f s",
            len(shapes),
            shapes[0].num_rows,
            time.monotonic() - started,
        )

    @torch.inference_mode()
    def _record(self, shape: GraphShape, dp_metadata: DPMetadata, recorder: Recorder) -> Recorded:
        batch, rows = self._inputs.batch(shape), shape.num_rows
        attention = self.model.graph_attention(rows, shape.num_blocks, self._eager.block_size)
        if attention is not None:
            attention.prepare(batch.block_tables, batch.context_lens)
            batch = replace(batch, attention=attention.plans)
            self._attention[shape] = attention
        return recorder.record(lambda: self._eager.run(batch, dp_metadata, EAGER))

    @property
    def model(self) -> Model:
        """See `Runner`."""
        return self._eager.model

    def batch(self, schedule: Schedule, chosen: torch.Tensor | None = None) -> ForwardBatch:
        """See `Runner`."""
        return self._eager.batch(schedule, chosen)

    def graph_for(self, batch: ForwardBatch) -> GraphShape:
        """See `Runner`: the smallest graph that holds a step of single tokens."""
        is_decode = all(count == 1 for count in batch.query_lens)
        # The chosen experts are handed out row by row, which no graph does.
        if not batch.num_tokens or not is_decode or batch.routed_experts is not None:
            return EAGER
        num_blocks = -(-max(batch.context_lens) // self._eager.block_size)
        return smallest(self._graphs, GraphShape(batch.num_tokens, num_blocks))

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, dp_metadata: DPMetadata, graph: GraphShape) -> torch.Tensor:
        """See `Runner`."""
        shape = smallest(self._graphs, graph)
        if shape == EAGER:
            return self._eager.run(batch, dp_metadata, EAGER)
        self._inputs.fill(batch, shape)
        if shape in self._attention:
            # Rows that only fill up are requests of one token.
            contexts = (*batch.context_lens, *[1] * (shape.num_rows - batch.num_tokens))
            self._attention[shape].prepare(self._inputs.batch(shape).block_tables, contexts)
        # A copy, as the next replay overwrites them.
        return self._graphs[shape].replay()[batch.logits_indices]
