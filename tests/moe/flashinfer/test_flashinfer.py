"""Attention through FlashInfer's calls, on a stand-in with its signatures, is torch's attention."""

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moed.config.errors import ConfigError
from moed.config.windows import Window
from moed.moe import attention_choice
from moed.moe.attention import TorchAttention
from moed.moe.attention_choice import check_attention, find_flashinfer, make_attention
from moed.moe.batch import ForwardBatch
from moed.moe.families import family_of
from moed.moe.flashinfer import AttentionSizes, FlashInfer, FlashInferPlan, pages_of
from moed.moe.kv_cache import KVCache
from tests.moe.harness import one_rank
from tests.server.engine.configs import engine_config

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 12
EXACT = AttentionSizes(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.3, dtype=torch.float32)
HALF = dataclasses.replace(EXACT, dtype=torch.bfloat16)
# Tokens of each request in the step, and in the cache.
STEPS = {
    "decodes": ((1, 1, 1), (4, 5, 11)),
    "one decode": ((1,), (1,)),
    "prompts": ((3, 8), (3, 8)),
    "a piece and a decode": ((4, 1), (10, 7)),
    "a request that waits": ((1, 0, 1), (5, 3, 8)),
}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that the package asks for at least."""
    monkeypatch.setattr("moed.moe.flashinfer.WORKSPACE_BYTES", 128 * 2**20)


def batch_of(query_lens: tuple[int, ...], contexts: tuple[int, ...]) -> ForwardBatch:
    positions = [
        position
        for count, context in zip(query_lens, contexts, strict=True)
        for position in range(context - count, context)
    ]
    tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).view(-1, 4)
    rows = torch.zeros(sum(query_lens), dtype=torch.int64)
    return ForwardBatch(
        token_ids=rows,
        positions=torch.tensor(positions),
        slot_mapping=rows,
        query_lens=query_lens,
        context_lens=contexts,
        block_tables=tables[: len(query_lens)],
        logits_indices=rows[:0],
    )


def filled_cache(sizes: AttentionSizes) -> KVCache:
    model = dataclasses.replace(engine_config().model, head_dim=sizes.head_dim, num_layers=2)
    cache = KVCache(model, sizes.num_kv_heads, NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, sizes.dtype, CPU)
    for seed, kept in enumerate((*cache.keys, *cache.values)):
        kept.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def query_of(count: int, sizes: AttentionSizes) -> torch.Tensor:
    shape = (count, sizes.num_heads, sizes.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(sizes.dtype)


@pytest.mark.parametrize("window", [None, Window(3)])
@pytest.mark.parametrize(("query_lens", "contexts"), STEPS.values(), ids=STEPS)
def test_a_step_is_torchs(
    exact_flashinfer: ModuleType,
    query_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    window: Window | None,
) -> None:
    backend, cache = FlashInfer(exact_flashinfer, EXACT, CPU), filled_cache(EXACT)
    batch, query = batch_of(query_lens, contexts), query_of(sum(query_lens), EXACT)
    plan = backend.plan(batch, BLOCK_SIZE, window, torch.float32)
    expected = TorchAttention().plan(batch, BLOCK_SIZE, window, torch.float32)
    for layer in range(2):
        torch.testing.assert_close(
            plan.attend(query, layer, cache, EXACT.scale, None),
            expected.attend(query, layer, cache, EXACT.scale, None),
            atol=1e-5,
            rtol=1e-5,
        )


def test_a_graph_follows_its_plan(exact_flashinfer: ModuleType) -> None:
    backend, cache = FlashInfer(exact_flashinfer, EXACT, CPU), filled_cache(EXACT)
    graph = backend.graph(3, 3, BLOCK_SIZE, (None, Window(2)))
    query = query_of(3, EXACT)
    for contexts in ((12, 12, 12), (4, 5, 11), (9, 1, 1)):
        batch = batch_of((1, 1, 1), contexts)
        graph.prepare(batch.block_tables, contexts)
        for plan, window in zip(graph.plans, (None, Window(2)), strict=True):
            expected = TorchAttention().plan(batch, BLOCK_SIZE, window, torch.float32)
            torch.testing.assert_close(
                plan.attend(query, 1, cache, EXACT.scale, None),
                expected.attend(query, 1, cache, EXACT.scale, None),
                atol=1e-5,
                rtol=1e-5,
            )


def test_layers_that_see_equally_far_share_a_plan(exact_flashinfer: ModuleType) -> None:
    backend = FlashInfer(exact_flashinfer, EXACT, CPU)
    graph = backend.graph(2, 3, BLOCK_SIZE, (None, None))
    first, second = graph.plans
    assert isinstance(first, FlashInferPlan) and isinstance(second, FlashInferPlan)
    assert first.wrapper is second.wrapper
    graph.prepare(batch_of((1, 1), (4, 5)).block_tables, (4, 5))
    assert first.wrapper.num_plans == 1
    # Eager steps take turns on one wrapper of each kind.
    plans = [
        backend.plan(batch_of(*STEPS[name]), BLOCK_SIZE, None, torch.float32)
        for name in ("decodes", "one decode", "prompts", "a piece and a decode")
    ]
    wrappers = [plan.wrapper for plan in plans]
    assert wrappers[0] is wrappers[1] and wrappers[2] is wrappers[3]
    assert len({id(wrapper) for wrapper in (*wrappers, first.wrapper)}) == 3


def test_a_step_without_tokens_plans_nothing(flashinfer: ModuleType) -> None:
    plan = FlashInfer(flashinfer, HALF, CPU).plan(batch_of((), ()), 4, None, torch.bfloat16)
    assert plan.wrapper is None


def test_pages_are_worked_out_by_hand() -> None:
    tables = torch.tensor([[7, 1, 0], [3, 0, 0], [2, 5, 4]])
    # 5 tokens are a block of 4 and 1 more; 4 fill a block; 9 are two blocks and 1 more.
    pages = pages_of(tables, (5, 4, 9), 4)
    assert pages.starts.tolist() == [0, 2, 3, 6]
    assert pages.blocks.tolist() == [7, 1, 3, 2, 5, 4]
    assert pages.last_lens.tolist() == [1, 4, 1]
    assert {part.dtype for part in vars(pages).values()} == {torch.int32}


def test_nothing_in_a_step_asks_for_sinks(flashinfer: ModuleType) -> None:
    plan = FlashInfer(flashinfer, HALF, CPU).plan(
        batch_of(*STEPS["decodes"]), BLOCK_SIZE, None, torch.bfloat16
    )
    with pytest.raises(AssertionError):
        plan.attend(query_of(3, HALF), 0, filled_cache(HALF), HALF.scale, torch.zeros(6))


def config_of(asked: str) -> Any:
    config = engine_config()
    model = dataclasses.replace(config.model, head_dim=64, dtype="bfloat16")
    runner = dataclasses.replace(config.runner, attention_backend=asked)
    return dataclasses.replace(config, model=model, runner=runner)


def made(asked: str, monkeypatch: pytest.MonkeyPatch, others: int = 1) -> object:
    """What a rank chooses, if it works (1) or not (0) on another rank."""
    config = config_of(asked)
    monkeypatch.setattr(attention_choice, "gather_ints", lambda groups, own: [own, others])
    features = family_of(config.model).features(config.model, 64)
    return make_attention(config, features, one_rank(), CPU)


@pytest.mark.parametrize("asked", ["auto", "flashinfer"])
def test_it_serves_where_it_works(
    asked: str, flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(made(asked, monkeypatch), FlashInfer)
    assert isinstance(made("sdpa", monkeypatch), TorchAttention)


def missing(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    return "ModuleNotFoundError"


def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    def run(self: object, *args: object) -> None:
        raise RuntimeError("ninja: build stopped\nmore")

    wrapper = sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "run", run)
    return "RuntimeError: ninja: build stopped;"


def wrong(monkeypatch: pytest.MonkeyPatch) -> str:
    wrapper = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    right = wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda self, *args: right(self, *args) + 0.1)
    return "prompts differ from torch's attention by"


def undefined(monkeypatch: pytest.MonkeyPatch) -> str:
    wrapper = sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper
    right = wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda self, *args: right(self, *args) * torch.nan)
    return "decodes differ from torch's attention by nan"


@pytest.mark.parametrize("fault", [missing, broken, wrong, undefined])
def test_where_it_does_not_torchs_serves_or_the_reason_is_told(
    fault: Any,
    flashinfer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = fault(monkeypatch)
    assert isinstance(made("auto", monkeypatch), TorchAttention)
    assert reason.rstrip(";") in caplog.text
    with pytest.raises(ConfigError, match=f"'flashinfer' is unavailable: {reason}") as caught:
        made("flashinfer", monkeypatch)
    assert "available are auto, sdpa" in str(caught.value)


def test_all_ranks_choose_alike(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made("auto", monkeypatch, others=0), TorchAttention)
    with pytest.raises(ConfigError, match="does not work on another rank"):
        made("flashinfer", monkeypatch, others=0)


def test_the_check_accepts_torchs_attention_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch)
    model = dataclasses.replace(engine_config().model, head_dim=64)
    assert check_attention(TorchAttention(), model, HALF, None, CPU) is None
    assert "ModuleNotFoundError" in str(find_flashinfer(model, HALF, None, CPU))
