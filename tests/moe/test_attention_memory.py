"""Attention takes no more than the plan says, at contexts that are long: on tensors without memory,
whose sizes are summed while they live. What torch's kernels take inside is not seen.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moed.config.attention_memory import attention_items
from moed.config.items import total
from moed.config.windows import Window
from moed.moe.attention import AttentionPlan, decode_groups, plan_attention
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache
from tests.server.engine.configs import engine_config

CPU = torch.device("cpu")
BLOCK_SIZE, TOKENS, LENGTH, REQUESTS = 16, 512, 32768, 64
HEADS, KV_HEADS, DIM = 8, 2, 64


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that live, and the most that lived at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return made

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


@contextlib.contextmanager
def measured() -> Iterator[Peak]:
    peak = Peak()
    with FakeTensorMode(allow_non_fake_inputs=True), peak:
        yield peak


def batch_of(*requests: tuple[int, int]) -> ForwardBatch:
    """Of (tokens, context)."""
    num_tokens = sum(count for count, _ in requests)
    rows = torch.zeros(num_tokens, dtype=torch.int64)
    return ForwardBatch(
        token_ids=rows,
        positions=rows,
        slot_mapping=rows,
        query_lens=tuple(count for count, _ in requests),
        context_lens=tuple(context for _, context in requests),
        block_tables=torch.zeros(len(requests), LENGTH // BLOCK_SIZE, dtype=torch.int64),
        logits_indices=rows[:0],
    )


BATCHES = {
    "decodes, all long": batch_of(*[(1, LENGTH)] * REQUESTS),
    "decodes, one long": batch_of((1, LENGTH), *[(1, 40)] * (REQUESTS - 1)),
    "a piece of a long prompt": batch_of((TOKENS, LENGTH)),
    "several pieces": batch_of(*[(TOKENS // 4, LENGTH)] * 4),
    "pieces and decodes": batch_of((TOKENS - 8, LENGTH), *[(1, LENGTH)] * 8),
}


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_takes_no_more_than_is_planned(batch: ForwardBatch, has_sinks: bool) -> None:
    config = engine_config(
        max_num_batched_tokens=TOKENS,
        max_num_seqs=REQUESTS,
        max_model_len=LENGTH,
        max_position_embeddings=LENGTH,
        block_size=BLOCK_SIZE,
    )
    model = dataclasses.replace(
        config.model,
        num_layers=2,
        num_attention_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        model_type="gpt_oss" if has_sinks else "qwen3_moe",
    )
    planned = total(attention_items(dataclasses.replace(config, model=model)))
    plain = dataclasses.replace(model, model_type="qwen3_moe")
    cache = KVCache(plain, KV_HEADS, 4, 4, BLOCK_SIZE, torch.bfloat16, CPU)
    query = torch.zeros(batch.num_tokens, HEADS, DIM, dtype=torch.bfloat16)
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16) if has_sinks else None
    with measured() as peak:
        plans = [plan_attention(batch, BLOCK_SIZE, None, torch.bfloat16)]
        if has_sinks:
            plans.append(plan_attention(batch, BLOCK_SIZE, Window(128), torch.bfloat16))
        for plan in plans:
            plan.attend(query, 0, cache, 1.0, sinks)
    # Queries and results are a few rows of the model's own.
    assert planned / 30 < peak.most <= planned + 4 * query.nbytes
    assert peak.now < peak.most


def test_groups_are_worked_out_by_hand() -> None:
    # Together 4 x 3 blocks.
    assert decode_groups([3, 1, 2, 3], 12) == [[0, 1, 2, 3]]
    # One of 9 goes alone, and two of at most 3 fill the 6.
    assert decode_groups([3, 9, 1, 2, 2], 6) == [[1], [0, 3], [4, 2]]
    assert decode_groups([], 6) == []


@pytest.mark.parametrize("window", [None, Window(5)])
def test_groups_change_no_result(window: Window | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(engine_config().model, head_dim=DIM)
    cache = KVCache(model, KV_HEADS, 12, 12, 4, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for kept in (*cache.keys, *cache.values):
        kept.copy_(torch.randn(kept.shape, generator=generator))
    contexts = (3, 15, 8, 4)
    tables = torch.randperm(12, generator=generator)[:4].repeat(4, 1).roll(1, 1)
    batch = dataclasses.replace(
        batch_of(*((1, context) for context in contexts)),
        positions=torch.tensor(contexts) - 1,
        block_tables=tables,
    )
    query = torch.randn(4, HEADS, DIM, generator=generator)

    def attended(most: int) -> tuple[AttentionPlan, torch.Tensor]:
        monkeypatch.setattr("moed.moe.attention.MAX_GRAPH_KV_ROWS", most)
        plan = plan_attention(batch, 4, window, torch.float32)
        return plan, plan.attend(query, 1, cache, 0.3, None)

    whole, expected = attended(1000)
    parted, found = attended(16)
    assert (len(whole.decodes), len(parted.decodes)) == (1, 3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
