"""Paged attention on the device, torch's and FlashInfer's, against the plain formula on a CPU."""

import dataclasses

import torch

from moed.config.engine_config import ModelConfig
from moed.config.windows import Window
from moed.moe.attention import AttentionBackend, TorchAttention
from moed.moe.attention_choice import find_flashinfer
from moed.moe.batch import ForwardBatch
from moed.moe.flashinfer import AttentionSizes
from moed.moe.kv_cache import KVCache
from tests.gpu.report import Report
from tests.gpu.setup import Setup
from tests.server.engine.configs import engine_config

BLOCK_SIZE = 16
# Heads, KV heads, head dim: Qwen3-30B's, Mixtral's.
LARGE, TINY = ((32, 4, 128), (32, 8, 128), (16, 2, 64)), ((4, 2, 16),)
# Tokens of each request in the step, and in the cache after it.
LARGE_STEPS = {
    "decodes": ((1,) * 5, (1, 16, 17, 900, 4000)),
    "prompts": ((300, 16), (300, 16)),
    "pieces and decodes": ((256, 1, 1, 33), (2000, 700, 1, 40)),
}
TINY_STEPS = {"decodes": ((1, 1), (3, 20)), "a piece and a decode": ((5, 1), (19, 4))}
# Of a result around 1.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-5}


def check_attention_backends(setup: Setup, report: Report) -> None:
    """Eager, and FlashInfer's also as a graph holds it."""
    for heads, kv_heads, dim in TINY if setup.tiny else LARGE:
        sizes = AttentionSizes(heads, kv_heads, dim, dim**-0.5, setup.dtype)
        backends: dict[str, AttentionBackend] = {"sdpa": TorchAttention()}
        found = find_flashinfer(model_of(dim), sizes, None, setup.torch_device)
        if isinstance(found, str):
            report.measure(f"FlashInfer H={heads} G={kv_heads} d={dim}", found)
        else:
            backends["FlashInfer"] = found
        for window in (None, Window(4 if setup.tiny else 100)):
            for step in (TINY_STEPS if setup.tiny else LARGE_STEPS).items():
                for name, backend in backends.items():
                    what = f"{name} H={heads} G={kv_heads} d={dim} {step[0]}"
                    what += "" if window is None else f", window {window.size}"
                    with report.attempt(what):
                        _check(setup, report, what, backend, sizes, step[1], window)


def model_of(head_dim: int) -> ModelConfig:
    """What a cache of one layer asks of a model."""
    return dataclasses.replace(engine_config().model, head_dim=head_dim, num_layers=1)


def _check(
    setup: Setup,
    report: Report,
    what: str,
    backend: AttentionBackend,
    sizes: AttentionSizes,
    step: tuple[tuple[int, ...], tuple[int, ...]],
    window: Window | None,
) -> None:
    query_lens, contexts = step
    cpu, device, limit = torch.device("cpu"), setup.torch_device, TOLERANCES[sizes.dtype]
    rounded = normal(3, sum(query_lens), sizes.num_heads, sizes.head_dim).to(sizes.dtype)
    expected = formula(
        rounded.float(), filled_cache(sizes, contexts, cpu), sizes, query_lens, contexts, window
    )
    found = _attend(backend, sizes, query_lens, contexts, window, rounded, device)
    report.check(what, float((found.cpu().float() - expected).abs().max()), limit)
    if set(query_lens) == {1}:
        widest = -(-max(contexts) // BLOCK_SIZE)
        graph = backend.graph(len(contexts), widest, BLOCK_SIZE, (window, window))
        if graph is not None:
            batch = batch_of(query_lens, contexts, device)
            graph.prepare(batch.block_tables, contexts)
            cache = filled_cache(sizes, contexts, device)
            found = graph.plans[0].attend(rounded.to(device), 0, cache, sizes.scale, None)
            error = float((found.cpu().float() - expected).abs().max())
            report.check(f"{what}, of a graph", error, limit)


def _attend(
    backend: AttentionBackend,
    sizes: AttentionSizes,
    query_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    window: Window | None,
    query: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    batch, cache = batch_of(query_lens, contexts, device), filled_cache(sizes, contexts, device)
    plan = backend.plan(batch, BLOCK_SIZE, window, sizes.dtype)
    return plan.attend(query.to(device), 0, cache, sizes.scale, None)


def formula(
    query: torch.Tensor,
    cache: KVCache,
    sizes: AttentionSizes,
    query_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    window: Window | None,
) -> torch.Tensor:
    """[T, H, d] float32 for `query` [T, H, d], one request after the other."""
    tables = batch_of(query_lens, contexts, torch.device("cpu")).block_tables
    outputs = []
    for own, table, context in zip(
        query.split_with_sizes(query_lens), tables, contexts, strict=True
    ):
        blocks, group = table[: -(-context // BLOCK_SIZE)], sizes.num_heads // sizes.num_kv_heads
        keys, values = (
            kept[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
            for kept in (cache.keys[0], cache.values[0])
        )
        scores = torch.einsum("nhd,chd->hnc", own, keys) * sizes.scale
        places = torch.arange(context - len(own), context)[:, None]
        hidden = torch.arange(context) > places
        if window is not None:
            hidden |= torch.arange(context) <= places - window.size
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hnc,chd->nhd", weights, values))
    return torch.cat(outputs)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled_cache(sizes: AttentionSizes, contexts: tuple[int, ...], device: torch.device) -> KVCache:
    """The same numbers in each dtype, up to rounding to 16 bits."""
    num_blocks = sum(-(-context // BLOCK_SIZE) for context in contexts)
    cache = KVCache(
        model_of(sizes.head_dim),
        sizes.num_kv_heads,
        num_blocks,
        num_blocks,
        BLOCK_SIZE,
        sizes.dtype,
        device,
    )
    for seed, kept in ((1, cache.keys[0]), (2, cache.values[0])):
        numbers = normal(seed, *kept.shape)
        half = sizes.dtype if sizes.dtype != torch.float32 else torch.bfloat16
        kept.copy_(numbers.to(half))
    return cache


def batch_of(
    query_lens: tuple[int, ...], contexts: tuple[int, ...], device: torch.device
) -> ForwardBatch:
    """Blocks of all requests, shuffled."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for row, own in enumerate(order.split_with_sizes(counts)):
        tables[row, : len(own)] = own
    positions = torch.cat(
        [
            torch.arange(context - count, context)
            for count, context in zip(query_lens, contexts, strict=True)
        ]
    )
    rows = torch.zeros(len(positions), dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=rows,
        positions=positions.to(device),
        slot_mapping=rows,
        query_lens=query_lens,
        context_lens=contexts,
        block_tables=tables.to(device),
        logits_indices=rows[:0],
    )
