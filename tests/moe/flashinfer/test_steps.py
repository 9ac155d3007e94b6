"""A model's steps through FlashInfer's calls, eager and as graphs, are those through torch."""

import dataclasses
import pathlib
from types import ModuleType

import pytest
import torch

from moed.config.graphs import EAGER, graph_shapes
from moed.dist.dp_metadata import DPMetadata
from moed.moe import attention_choice
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache
from moed.server.graph_inputs import GraphInputs
from moed.server.graph_runner import GraphRunner
from moed.server.graphs import Call, CallRecorder, RecordedCall
from moed.server.model_runner import ModelRunner, Runner
from tests.moe.checkpoints import make_checkpoint
from tests.moe.flashinfer import stand_in
from tests.moe.harness import engine_config, load, one_rank

CPU = torch.device("cpu")
BLOCK_SIZE, SCRAP = 2, 9


class StrictRecorder(CallRecorder):
    """Within a graph nothing may be planned."""

    def record(self, call: Call) -> RecordedCall:
        def within() -> torch.Tensor:
            stand_in._Wrapper.capturing = True
            try:
                return call()
            finally:
                stand_in._Wrapper.capturing = False

        return super().record(within)


def runner_of(folder: pathlib.Path, attention: str) -> tuple[Runner, KVCache]:
    """With graphs of 1, 2 and 4 rows, and a cache of random numbers."""
    config = engine_config(folder)
    runner = dataclasses.replace(config.runner, attention_backend=attention)
    config = dataclasses.replace(config, runner=runner)
    cache = KVCache(config.model, 2, SCRAP + 1, SCRAP + 1, BLOCK_SIZE, torch.float32, CPU)
    for seed, kept in enumerate((*cache.keys, *cache.values)):
        kept.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed)))
    decoder = load(config, one_rank())
    assert decoder.copies_context is (attention == "sdpa")
    eager = ModelRunner(decoder, cache, BLOCK_SIZE, CPU)
    shapes = graph_shapes((1, 2, 4), 8, BLOCK_SIZE, copies_context=decoder.copies_context)
    inputs = GraphInputs(shapes, BLOCK_SIZE, (SCRAP, None), CPU)
    return GraphRunner(eager, shapes, inputs, StrictRecorder(), config.parallel, 0), cache


def step(*requests: tuple[int, int, tuple[int, ...]]) -> ForwardBatch:
    """Of (tokens, context, blocks)."""
    width = max(len(blocks) for *_, blocks in requests)
    places = [
        (position, blocks)
        for count, context, blocks in requests
        for position in range(context - count, context)
    ]
    slots = [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at, blocks in places]
    tables = [[*blocks, *[0] * (width - len(blocks))] for *_, blocks in requests]
    return ForwardBatch(
        token_ids=torch.tensor([10 + position for position, _ in places]),
        positions=torch.tensor([position for position, _ in places]),
        slot_mapping=torch.tensor(slots),
        query_lens=tuple(count for count, *_ in requests),
        context_lens=tuple(context for _, context, _ in requests),
        block_tables=torch.tensor(tables),
        logits_indices=torch.arange(len(places)),
    )


STEPS = (
    step((3, 3, (3, 1)), (1, 2, (7,)), (4, 5, (0, 5, 2))),
    step((1, 4, (3, 1)), (1, 3, (7, 4)), (1, 6, (0, 5, 2))),
    step((1, 7, (0, 5, 2, 6))),
    step((1, 5, (3, 1, 8)), (1, 4, (7, 4))),
)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_steps_are_torchs(
    architecture: str,
    exact_flashinfer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setattr("moed.moe.flashinfer.WORKSPACE_BYTES", 128 * 2**20)
    monkeypatch.setattr(attention_choice, "gather_ints", lambda groups, own: [own])
    make_checkpoint(architecture, tmp_path)
    torchs, torchs_cache = runner_of(tmp_path, "sdpa")
    flashinfers, cache = runner_of(tmp_path, "flashinfer")
    replayed = 0
    for batch in STEPS:
        metadata = DPMetadata(torch.tensor([batch.num_tokens], dtype=torch.int32), 0, 1)
        graph = flashinfers.graph_for(batch)
        replayed += graph != EAGER
        expected = torchs.run(batch, metadata, EAGER)
        logits = flashinfers.run(batch, metadata, graph)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert replayed == 3
    for kept, wanted in zip(cache.keys, torchs_cache.keys, strict=True):
        torch.testing.assert_close(kept[:SCRAP], wanted[:SCRAP], atol=1e-4, rtol=1e-4)
