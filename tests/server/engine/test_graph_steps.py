"""Engines that replay their decode steps answer as `transformers` does, whatever backend and split.

On a CPU a graph is the recorded call itself, on the memory that a graph would read: so padding,
buckets, widths and ranks without work are the same as on a GPU.
"""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from moed.config import graphs as graph_sizes
from moed.config.graphs import GraphShape
from moed.dist.groups import Groups
from moed.server.graph_inputs import GraphInputs
from moed.server.graphs import RecordedCall
from tests.dist.counting import counted_collectives
from tests.server.engine.test_matrix import PROMPT_LENGTHS, Truth, check, prompts_of, serve, truth
from tests.worker_pool import WorkerPool

BUDGETS = (1, 16)
# So that requests of a few dozen tokens need several widths.
MIN_GRAPH_TOKENS = 16


def serve_graphs(
    groups: Groups, path: str, backend: str, members: int, enable_expert_parallel: bool
) -> dict[str, Any]:
    """`serve` with graphs: its answers, the shapes that were replayed with how many real rows, and
    the collectives.
    """
    replayed: list[tuple[GraphShape, int]] = []
    calls: list[int] = []
    fill, replay = GraphInputs.fill, RecordedCall.replay

    def noted_fill(inputs: GraphInputs, batch: Any, shape: GraphShape) -> None:
        replayed.append((shape, batch.num_tokens))
        fill(inputs, batch, shape)

    def noted_replay(recorded: RecordedCall) -> Any:
        before = len(names)
        output = replay(recorded)
        calls.append(len(names) - before)
        return output

    with (
        counted_collectives() as names,
        mock.patch.object(graph_sizes, "MIN_GRAPH_TOKENS", MIN_GRAPH_TOKENS),
        mock.patch.object(GraphInputs, "fill", noted_fill),
        mock.patch.object(RecordedCall, "replay", noted_replay),
    ):
        answers = serve(groups, path, backend, BUDGETS, members, enable_expert_parallel, True)
    return {
        "answers": answers,
        "shapes": [shape for shape, _ in replayed],
        "rows": [count for _, count in replayed],
        "calls": calls,
        # A plan without tokens is one broadcast, inside a DP rank, instead of two.
        "names": Counter(name for name in names if name != "broadcast"),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Truth]:
    """A model with shared experts, so that padding passes these too."""
    from tests.moe.checkpoints import make_model

    model = make_model("qwen2_moe")
    folder: pathlib.Path = tmp_path_factory.mktemp("graphs")
    model.save_pretrained(folder)
    return (
        str(folder),
        {rank: [truth(model, prompt) for prompt in prompts_of(rank)] for rank in PROMPT_LENGTHS},
    )


@pytest.mark.parametrize(
    ("ranks", "members", "backend", "enable_expert_parallel"),
    [
        (1, 1, "local", True),
        # Rank 1 of two or three has no request: it replays what the others do.
        (2, 1, "all2allv", True),
        (3, 1, "allgather_reducescatter", True),
        (2, 1, "deepep_low_latency", True),
        (2, 2, "all2allv", True),
        (2, 2, "deepep_low_latency", True),
        (2, 2, "allgather_reducescatter", False),
    ],
)
def test_replayed_steps_equal_transformers(
    checkpoint: tuple[str, Truth],
    workers: Callable[[int], WorkerPool],
    ranks: int,
    members: int,
    backend: str,
    enable_expert_parallel: bool,
) -> None:
    path, expected = checkpoint
    arguments = (path, backend, members, enable_expert_parallel)
    by_process = workers(ranks * members).run(serve_graphs, *arguments)
    answers = [seen["answers"] for seen in by_process[::members]]
    check(answers, expected, BUDGETS, f"of {ranks} x {members}, {backend}, replayed")

    first = by_process[0]
    # Prompts alone are eager: 24 tokens of each request, most of them with the other.
    assert len(first["shapes"]) > 24 * len(BUDGETS)
    assert {shape.num_rows for shape in first["shapes"]} == {1, 2}
    assert len({shape.num_blocks for shape in first["shapes"]}) > 1
    for process, seen in enumerate(by_process):
        assert seen["shapes"] == first["shapes"]
        # Each replay makes as many collectives as any other, on every process.
        assert len(set(seen["calls"])) == 1 and seen["calls"] == first["calls"]
        assert seen["names"] == first["names"]
        if process // members == 1:
            assert set(seen["rows"]) == {0}


@pytest.mark.parametrize("backend", ["all2allv", "deepep_low_latency", "allgather_reducescatter"])
def test_padding_is_nobodys_load(
    checkpoint: tuple[str, Truth], workers: Callable[[int], WorkerPool], backend: str
) -> None:
    """The rows that experts have counted are those of an eager run."""
    path, _ = checkpoint
    loads = [workers(2).run(counted_rows, path, backend, graphs) for graphs in (False, True)]
    assert loads[0] == loads[1]
    assert all(sum(rows) for rows in loads[0])


def counted_rows(groups: Groups, path: str, backend: str, with_graphs: bool) -> list[int]:
    """By slot, over all layers."""
    from moed.server.engine import Engine

    engines: list[Engine] = []
    start = Engine.start

    def noted(engine: Engine, startup_s: dict[str, float]) -> None:
        start(engine, startup_s)
        engines.append(engine)

    with mock.patch.object(Engine, "start", noted):
        serve(groups, path, backend, (16,), 1, True, with_graphs)
    (engine,) = engines
    loop: Any = engine._loop
    rows: list[int] = loop._runner.model.moe_rows.sum(dim=0).tolist()
    return rows
