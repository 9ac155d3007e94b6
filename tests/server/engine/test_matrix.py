"""Greedy tokens and their logprobs equal `transformers`, whatever DP size, backend and budget."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from moed.config.graphs import graph_buckets
from moed.dist.groups import Groups
from moed.dist.registry import capabilities
from moed.server.messages import (
    AddRequest,
    FromEngine,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenOutput,
    Wake,
)
from tests.dist.members import with_members
from tests.server.engine.configs import engine_config
from tests.worker_pool import WorkerPool

BUDGETS = (1, 7, 16, 17, 64, 4096)
SPLIT_BUDGETS = (1, 7, 64)
NUM_TOKENS = 24
# By rank: rank 1 has nothing to do, and takes part all the same.
PROMPT_LENGTHS = {0: (5, 23), 1: (), 2: (40, 16)}
TOLERANCE = 1e-4


def prompts_of(rank: int) -> list[list[int]]:
    return [
        [(7 * position + 13 * rank + length) % 90 + 3 for position in range(length)]
        for length in PROMPT_LENGTHS[rank]
    ]


class ScriptedChannel:
    """Gives this rank its requests at once and, when they have ended, the end."""

    def __init__(self, requests: list[AddRequest]) -> None:
        self._inbox: list[ToEngine] = list(requests)
        self._open = {request.request_id for request in requests}
        self.outputs: dict[str, list[TokenOutput]] = {
            request.request_id: [] for request in requests
        }

    def receive(self) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages or ([] if self._open else [Shutdown(), Wake(1)])

    def wait(self, timeout_s: float) -> bool:
        assert not self._open, "nobody sleeps before the end"
        return True

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            assert message.stats.max_step_tokens <= self.budget
            for output in message.outputs:
                self.outputs[output.request_id].append(output)
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)

    budget = 0


Answers = list[list[tuple[list[int], list[float]]]]


def serve(
    groups: Groups,
    path: str,
    backend: str,
    budgets: tuple[int, ...],
    tensor_parallel_size: int,
    enable_expert_parallel: bool,
    with_graphs: bool = False,
    step_ahead: bool = False,
) -> Answers | None:
    """On every rank: an engine for each budget; per budget and prompt, tokens and logprobs. None on
    members that compute with another.
    """
    from moed.server.engine import Engine

    groups = with_members(groups, tensor_parallel_size)
    hf_config = json.loads((pathlib.Path(path) / "config.json").read_text())
    results = []
    for budget in budgets:
        config = engine_config(
            backend=capabilities()[backend],
            ranks=groups.world_size // tensor_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            path=path,
            hf_config=hf_config,
            max_num_batched_tokens=budget,
            max_num_seqs=min(8, budget),
            num_kv_blocks=64,
            graph_buckets=graph_buckets(min(8, budget)) if with_graphs else (),
            step_ahead=step_ahead,
        )
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=0.0, logprobs=0)
        requests = [
            AddRequest(request_id=str(index), epoch=0, prompt_token_ids=prompt, params=params)
            for index, prompt in enumerate(prompts_of(groups.data_parallel_rank))
        ]
        channel = ScriptedChannel(requests)
        channel.budget = budget
        engine = Engine(config, groups, channel, None)
        engine.start({})
        engine.run()
        if groups.tensor_rank == 0:
            results.append([_joined(channel.outputs[request.request_id]) for request in requests])
    return results if groups.tensor_rank == 0 else None


def _joined(outputs: list[TokenOutput]) -> tuple[list[int], list[float]]:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    return tokens, logprobs


def truth(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens of `transformers`, and the logprob of each."""
    import torch

    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            token = int(logits.argmax())
            logprobs.append(float(torch.log_softmax(logits, dim=-1)[token]))
            tokens.append(token)
    return tokens, logprobs


Truth = dict[int, list[tuple[list[int], list[float]]]]


FAMILIES = [
    "qwen3_moe",
    "mixtral",
    pytest.param("qwen2_moe", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Truth]:
    """Folder of a small checkpoint, and what `transformers` answers to every rank's prompts."""
    return made(request.param, tmp_path_factory)


def made(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Truth]:
    import torch

    from tests.moe.checkpoints import make_model

    # So small a model is slower with more, by far on a busy machine.
    torch.set_num_threads(1)
    model = make_model(family)
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    answers = {
        rank: [truth(model, prompt) for prompt in prompts_of(rank)] for rank in PROMPT_LENGTHS
    }
    return str(folder), answers


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (1, "local"),
        (2, "all2allv"),
        (2, "allgather_reducescatter"),
        (3, "all2allv"),
        (3, "allgather_reducescatter"),
    ],
)
def test_outputs_equal_transformers(
    checkpoint: tuple[str, Truth],
    workers: Callable[[int], WorkerPool],
    ranks: int,
    backend: str,
) -> None:
    path, expected = checkpoint
    by_rank = workers(ranks).run(serve, path, backend, BUDGETS, 1, True)
    check(by_rank, expected, BUDGETS, f"of {ranks}, {backend}")


@pytest.mark.parametrize(
    ("ranks", "members", "backend", "enable_expert_parallel"),
    [
        (2, 1, "deepep_low_latency", True),
        (2, 1, "deepep_high_throughput", True),
        (3, 1, "deepep_v2", True),
        (2, 2, "deepep_low_latency", True),
        (1, 2, "all2allv", True),
        (2, 2, "all2allv", True),
        (1, 2, "allgather_reducescatter", True),
        (2, 2, "allgather_reducescatter", True),
        # More members than KV heads, and rows that do not divide.
        (1, 4, "all2allv", True),
        (1, 2, "allgather_reducescatter", False),
        (3, 1, "allgather_reducescatter", False),
        (2, 2, "allgather_reducescatter", False),
    ],
)
def test_outputs_do_not_depend_on_how_work_is_split(
    checkpoint: tuple[str, Truth],
    workers: Callable[[int], WorkerPool],
    ranks: int,
    members: int,
    backend: str,
    enable_expert_parallel: bool,
) -> None:
    path, expected = checkpoint
    arguments = (path, backend, SPLIT_BUDGETS, members, enable_expert_parallel)
    by_process = workers(ranks * members).run(serve, *arguments)
    assert [answers is not None for answers in by_process] == (
        [True] + [False] * (members - 1)
    ) * ranks
    check(by_process[::members], expected, SPLIT_BUDGETS, f"of {ranks} x {members}, {backend}")


@pytest.mark.parametrize(("ranks", "with_graphs"), [(1, False), (2, True), (3, False)])
def test_one_step_ahead(
    tmp_path_factory: pytest.TempPathFactory,
    workers: Callable[[int], WorkerPool],
    ranks: int,
    with_graphs: bool,
) -> None:
    """Of two and three ranks, one has nothing to do."""
    path, expected = made("qwen3_moe", tmp_path_factory)
    backend = "local" if ranks == 1 else "all2allv"
    arguments = (path, backend, SPLIT_BUDGETS, 1, True, with_graphs, True)
    by_rank = workers(ranks).run(serve, *arguments)
    check(by_rank, expected, SPLIT_BUDGETS, f"of {ranks}, one step ahead")


def test_latent_attention_over_processes(
    tmp_path_factory: pytest.TempPathFactory, workers: Callable[[int], WorkerPool]
) -> None:
    """DP with an idle rank, then heads divided over the members of one rank."""
    path, expected = made("deepseek_v3", tmp_path_factory)
    for ranks, members in ((2, 1), (1, 2)):
        by_process = workers(2).run(serve, path, "all2allv", SPLIT_BUDGETS, members, True)
        check(by_process[::members], expected, SPLIT_BUDGETS, f"of {ranks} x {members}")


@pytest.mark.parametrize(
    ("family", "with_graphs"), [("gpt_oss", False), ("gpt_oss", True), ("llama4_text", False)]
)
def test_layers_with_windows_over_processes(
    tmp_path_factory: pytest.TempPathFactory,
    workers: Callable[[int], WorkerPool],
    family: str,
    with_graphs: bool,
) -> None:
    """With blocks of their own, which are given back and used again while requests go on."""
    path, expected = made(family, tmp_path_factory)
    for ranks, members in ((2, 1), (1, 2)):
        arguments = (path, "all2allv", SPLIT_BUDGETS, members, True, with_graphs)
        by_process = workers(2).run(serve, *arguments)
        check(by_process[::members], expected, SPLIT_BUDGETS, f"of {ranks} x {members}")


def check(by_rank: list[Any], expected: Truth, budgets: tuple[int, ...], which: str) -> None:
    for rank, by_budget in enumerate(by_rank):
        for budget, answers in zip(budgets, by_budget, strict=True):
            for answer, wanted in zip(answers, expected[rank], strict=True):
                where = f"rank {rank} {which}, B {budget}"
                assert answer[0] == wanted[0], where
                assert answer[1] == pytest.approx(wanted[1], abs=TOLERANCE), where
