"""Experts spread over ranks: each rank's own requests equal `transformers`, whatever the others do.

Every rank has prompts of its own; step by step they run ragged numbers of tokens, or none.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from moed.config.engine_config import EngineConfig
from moed.config.expert_placement import ExpertPlacement
from moed.config.weight_bytes import moe_layers
from moed.dist.groups import Groups
from moed.dist.registry import capabilities
from moed.moe.families import FAMILIES
from tests.moe.checkpoints import make_checkpoint, prompt, true_greedy, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank
from tests.moe.rank_jobs import generate
from tests.worker_pool import WorkerPool

BACKENDS = [name for name, entry in capabilities().items() if entry.requires_expert_parallel]
TOLERANCE = 1e-4

Workers = Callable[[int], WorkerPool]
# Tokens of each rank's requests "a" and "b", step by step.
Plan = list[list[dict[str, int]]]

# Rank 1 starts late, rank 0 ends early, and in one step nobody but the last rank has work.
PLAN: Plan = [
    [{"a": 19}, {}, {"a": 1}],
    [{"a": 1, "b": 33}, {"a": 7}, {}],
    [{}, {"a": 16, "b": 1}, {"a": 5}],
    [{}, {}, {"a": 1, "b": 2}],
    [{}, {"b": 1, "a": 1}, {"b": 40}],
]


def text(rank: int, request: str) -> list[int]:
    return prompt(64, seed=100 * rank + ord(request))


def run_plan(
    groups: Groups, config: EngineConfig, plan: Plan
) -> tuple[dict[str, torch.Tensor], int, int]:
    """On one rank: all logits of its requests; the experts it holds; the pairs it computed."""
    decoder = load(config, groups)
    stepper = Stepper(config, decoder, groups.rank)
    done = {"a": 0, "b": 0}
    logits: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for step in plan:
        sizes = [sum(step[rank].values()) for rank in range(groups.world_size)]
        own = step[groups.rank]
        pieces = {
            name: text(groups.rank, name)[done[name] : done[name] + num_tokens]
            for name, num_tokens in own.items()
        }
        for name, found in stepper.step(pieces, sizes).items():
            logits[name].append(found)
            done[name] += own[name]
    placement = ExpertPlacement.linear(config.model.num_experts, groups.world_size)
    whole = {name: torch.cat(parts) for name, parts in logits.items() if parts}
    return whole, placement.num_local(groups.rank), stepper.num_moe_rows


def widened(plan: Plan, num_ranks: int) -> Plan:
    """`plan` for more or fewer ranks than it was written for."""
    return [[step[rank % len(step)] for rank in range(num_ranks)] for step in plan]


def assert_equal_to_truth(truth: Any, results: Sequence[Any]) -> None:
    for rank, (logits, _, _) in enumerate(results):
        for name, found in logits.items():
            expected = true_logits(truth, text(rank, name)[: found.shape[0]])
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """Truth and folder, made once, by family and number of experts."""
    torch.set_num_threads(1)
    made: dict[tuple[str, int], tuple[Any, pathlib.Path]] = {}

    def checkpoint(family: str, num_experts: int) -> tuple[Any, pathlib.Path]:
        key = (family, num_experts)
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[key] = make_checkpoint(family, folder, num_experts=num_experts), folder
        return made[key]

    return checkpoint


CASES = [
    ("qwen3_moe", 8, 2),
    ("mixtral", 8, 2),
    ("qwen2_moe", 8, 2),
    ("qwen3_moe", 8, 3),
    ("qwen3_moe", 6, 4),
    ("qwen3_moe", 3, 2),
    ("mixtral", 1, 2),
    ("glm4_moe", 8, 2),
    ("deepseek_v3", 8, 2),
    ("gpt_oss", 6, 2),
]
# Emulated, and slower: the odd ones.
DEEP_EP_CASES = [("mixtral", 8, 2), ("gpt_oss", 6, 2), ("qwen3_moe", 8, 3), ("mixtral", 1, 2)]


@pytest.mark.parametrize(
    ("backend", "family", "num_experts", "num_ranks"),
    [
        (backend, *case)
        for backend in BACKENDS
        for case in (DEEP_EP_CASES if backend.startswith("deepep") else CASES)
    ],
)
def test_each_rank_equals_transformers(
    workers: Workers,
    checkpoints: Callable[..., tuple[Any, Any]],
    backend: str,
    family: str,
    num_experts: int,
    num_ranks: int,
) -> None:
    truth, folder = checkpoints(family, num_experts)
    config = engine_config(folder, backend=backend, ranks=num_ranks)
    plan = widened(PLAN, num_ranks)
    results = workers(num_ranks).run(run_plan, config, plan)
    assert_equal_to_truth(truth, results)
    # No token is dropped, and none is computed twice.
    num_tokens = sum(n for step in plan for own in step for n in own.values())
    num_pairs = num_tokens * config.model.top_k * sum(moe_layers(config.model))
    assert sum(pairs for _, _, pairs in results) == num_pairs
    for _, num_local, pairs in results:
        assert num_local or not pairs


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_over_each_backend(
    workers: Workers,
    checkpoints: Callable[..., tuple[Any, Any]],
    family: str,
    backend: str,
) -> None:
    truth, folder = checkpoints(family, 8)
    config = engine_config(folder, backend=backend, ranks=2)
    assert_equal_to_truth(truth, workers(2).run(run_plan, config, widened(PLAN, 2)))
    prompts = [prompt(9, seed=3), prompt(40, seed=4)]
    found = workers(2).run(generate, str(folder), backend, prompts, 24)
    assert found == [true_greedy(truth, tokens, 24) for tokens in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_that_never_has_work(
    workers: Workers, checkpoints: Callable[..., tuple[Any, Any]], backend: str, worker: int
) -> None:
    truth, folder = checkpoints("qwen3_moe", 8)
    steps: list[dict[str, int]] = [{"a": 30}, {"a": 1, "b": 1}, {"a": 1}]
    plan: Plan = [[{}, {}] for _ in steps]
    for step, own in zip(plan, steps, strict=True):
        step[worker] = own
    results = workers(2).run(run_plan, engine_config(folder, backend=backend, ranks=2), plan)
    assert set(results[worker][0]) == {"a", "b"}
    assert results[1 - worker][0] == {}
    assert_equal_to_truth(truth, results)
    # Its experts have worked for the other rank all the same.
    assert results[1 - worker][2] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_without_any_tokens(
    workers: Workers, checkpoints: Callable[..., tuple[Any, Any]], backend: str
) -> None:
    truth, folder = checkpoints("qwen3_moe", 8)
    plan: Plan = [[{}, {}], [{"a": 5}, {"a": 3}], [{}, {}]]
    results = workers(2).run(run_plan, engine_config(folder, backend=backend, ranks=2), plan)
    assert_equal_to_truth(truth, results)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(
    workers: Workers, checkpoints: Callable[..., tuple[Any, Any]]
) -> None:
    _, folder = checkpoints("qwen3_moe", 8)
    plan: Plan = [[{"a": 11}, {"a": 11}]]
    alone = engine_config(folder, load_format="dummy", seed=3)
    tokens = {rank: text(rank, "a")[:11] for rank in range(2)}
    expected = [
        Stepper(alone, load(alone, one_rank())).step({"a": tokens[rank]})["a"] for rank in range(2)
    ]
    for backend in BACKENDS:
        config = engine_config(folder, backend=backend, ranks=2, load_format="dummy", seed=3)
        results = workers(2).run(run_plan, config, plan)
        for (logits, _, _), own in zip(results, expected, strict=True):
            torch.testing.assert_close(logits["a"], own, rtol=0, atol=1e-5)
    other = engine_config(folder, load_format="dummy", seed=4)
    differing = Stepper(other, load(other, one_rank())).step({"a": tokens[0]})["a"]
    assert (differing - expected[0]).abs().max() > 0.1
