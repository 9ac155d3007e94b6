"""What a graph reads of a step, worked out by hand; and that padding touches no request's KV."""

import dataclasses
import pathlib

import pytest
import torch

from moed.config.graphs import EAGER, GraphShape, graph_shapes
from moed.dist.dp_metadata import DPMetadata
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache
from moed.server.graph_inputs import GraphInputs
from moed.server.graph_runner import GraphRunner
from moed.server.graphs import CallRecorder
from moed.server.model_runner import ModelRunner
from tests.moe.harness import engine_config, load, one_rank

CPU = torch.device("cpu")
BLOCK_SIZE = 2
SCRAP = 9


def decodes(*positions: int, blocks: tuple[tuple[int, ...], ...], width: int) -> ForwardBatch:
    """One token of each request; token ids follow positions."""
    tables = [list(own) + [0] * (width - len(own)) for own in blocks]
    slots = [
        own[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position, own in zip(positions, blocks, strict=True)
    ]
    return ForwardBatch(
        token_ids=torch.tensor([10 + position for position in positions]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_lens=(1,) * len(positions),
        context_lens=tuple(position + 1 for position in positions),
        block_tables=torch.tensor(tables).view(len(positions), width),
        logits_indices=torch.arange(len(positions)),
    )


def test_rows_that_fill_up_lie_in_the_scrap_block() -> None:
    inputs = GraphInputs((GraphShape(4, 3), GraphShape(2, 2)), BLOCK_SIZE, (SCRAP, None), CPU)
    shape = GraphShape(4, 3)
    # The second request holds a block more than its context, and than the graph, needs.
    inputs.fill(decodes(3, 0, blocks=((5, 1), (7, 2, 3, 4)), width=4), shape)
    batch = inputs.batch(shape)
    assert batch.token_ids.tolist() == [13, 10, 0, 0]
    assert batch.positions.tolist() == [3, 0, 0, 0]
    # 1 * 2 + 1; 7 * 2; 9 * 2 for both others.
    assert batch.slot_mapping.tolist() == [3, 14, 18, 18]
    assert batch.block_tables.tolist() == [[5, 1, 0], [7, 2, 3], [9, 9, 9], [9, 9, 9]]
    assert inputs.padding(shape).tolist() == [False, False, True, True]
    assert batch.query_lens == (1, 1, 1, 1) and batch.context_lens == (6, 6, 6, 6)
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]


def test_a_later_step_leaves_nothing_of_an_earlier_one() -> None:
    inputs = GraphInputs((GraphShape(3, 2),), BLOCK_SIZE, (SCRAP, None), CPU)
    shape = GraphShape(3, 2)
    inputs.fill(decodes(3, 2, 1, blocks=((5, 1), (6, 2), (7,)), width=2), shape)
    inputs.fill(decodes(1, blocks=((4,),), width=1), shape)
    batch = inputs.batch(shape)
    assert batch.token_ids.tolist() == [11, 0, 0]
    assert batch.slot_mapping.tolist() == [9, 18, 18]
    assert batch.block_tables.tolist() == [[4, 9], [9, 9], [9, 9]]
    # A rank without work.
    inputs.fill(decodes(blocks=(), width=0), shape)
    assert inputs.padding(shape).all() and (inputs.batch(shape).block_tables == SCRAP).all()


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, GraphRunner, KVCache]:
    """The same model and cache, eager and with graphs of 1, 2 and 4 rows."""
    from tests.moe.checkpoints import make_checkpoint

    folder: pathlib.Path = tmp_path_factory.mktemp("model")
    make_checkpoint("qwen3_moe", folder)
    config = engine_config(folder)
    cache = KVCache(config.model, 2, SCRAP + 1, SCRAP + 1, BLOCK_SIZE, torch.float32, CPU)
    eager = ModelRunner(load(config, one_rank()), cache, BLOCK_SIZE, CPU)
    shapes = graph_shapes((1, 2, 4), 8, BLOCK_SIZE, copies_context=True)
    inputs = GraphInputs(shapes, BLOCK_SIZE, (SCRAP, None), CPU)
    return eager, GraphRunner(eager, shapes, inputs, CallRecorder(), config.parallel, 0), cache


def metadata(num_tokens: int) -> DPMetadata:
    return DPMetadata(torch.tensor([num_tokens], dtype=torch.int32), 0, 1)


def test_a_replay_writes_what_the_eager_step_writes_and_no_other_block(
    runners: tuple[ModelRunner, GraphRunner, KVCache],
) -> None:
    eager, graphs, cache = runners
    batch = decodes(2, 5, 0, blocks=((3, 1), (0, 5, 2), (7,)), width=3)

    def state() -> list[torch.Tensor]:
        return [kept[:SCRAP].clone() for kept in (*cache.keys, *cache.values)]

    for kept in (*cache.keys, *cache.values):
        kept.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)))
    before = state()
    expected = eager.run(batch, metadata(3), EAGER)
    written = state()
    for kept, old in zip((*cache.keys, *cache.values), before, strict=True):
        kept[:SCRAP] = old
    logits = graphs.run(batch, metadata(3), graphs.graph_for(batch))
    # Four rows in one product instead of three may round otherwise.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for now, wanted in zip(state(), written, strict=True):
        torch.testing.assert_close(now, wanted, atol=1e-5, rtol=1e-5)
    assert any((now != old).any() for now, old in zip(state(), before, strict=True))


def test_what_no_graph_holds_is_eager(runners: tuple[ModelRunner, GraphRunner, KVCache]) -> None:
    _, graphs, _ = runners
    three = decodes(2, 5, 0, blocks=((3, 1), (0, 5, 2), (7,)), width=3)
    assert graphs.graph_for(three) == GraphShape(4, 4)
    none = decodes(blocks=(), width=0)
    assert graphs.graph_for(none) == EAGER
    five = decodes(0, 0, 0, 0, 0, blocks=((1,), (2,), (3,), (4,), (5,)), width=1)
    assert graphs.graph_for(five) == EAGER
    # Blocks for 8 tokens, and a context of 9.
    long = decodes(8, blocks=((1, 2, 3, 4, 5),), width=5)
    assert graphs.graph_for(long) == EAGER
    piece = dataclasses.replace(three, query_lens=(2, 1))
    assert graphs.graph_for(piece) == EAGER
    asked = dataclasses.replace(three, routed_experts=torch.zeros(3, 1, 1))
    assert graphs.graph_for(asked) == EAGER
    assert graphs.run(three, metadata(3), EAGER).shape == (3, 97)
