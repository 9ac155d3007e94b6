"""Which attention serves: FlashInfer's is tried with known numbers first, before anything relies on
it, since it compiles its kernels when they are first asked for.
"""

import importlib
import logging
from dataclasses import replace

import torch

from moed.config.attention import FLASHINFER, SDPA
from moed.config.engine_config import EngineConfig, ModelConfig
from moed.config.errors import ConfigError, RankMismatch
from moed.config.windows import Window
from moed.dist.agreement import gather_ints
from moed.dist.groups import Groups
from moed.moe.attention import AttentionBackend, TorchAttention
from moed.moe.batch import ForwardBatch
from moed.moe.families import DecoderFeatures
from moed.moe.flashinfer import AttentionSizes, FlashInfer
from moed.moe.kv_cache import KVCache, local_kv_heads

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
NUM_BLOCKS = 8
# Of the check's 16-bit results, whose values are sums of a few numbers around 1.
TOLERANCE = 3e-2


def make_attention(
    config: EngineConfig, features: DecoderFeatures, groups: Groups, device: torch.device
) -> AttentionBackend:
    """As configured, the same on all ranks. Collective, unless torch's is configured.

    Raises `ConfigError` when FlashInfer is asked for by name and does not work on some rank.
    """
    asked = config.runner.attention_backend
    if asked == SDPA:
        return TorchAttention()
    sizes = _sizes(config, features)
    found = find_flashinfer(config.model, sizes, features.window, device)
    reason = found if isinstance(found, str) else None
    if min(gather_ints(groups, int(reason is None))):
        assert isinstance(found, FlashInfer)
        return found
    reason = reason or "it does not work on another rank"
    if asked == FLASHINFER:
        raise ConfigError(
            f"attention_backend {FLASHINFER!r} is unavailable: {reason}; available are auto, {SDPA}"
        )
    logger.warning("attention is torch's (%s), as FlashInfer does not work: %s", SDPA, reason)
    return TorchAttention()


def keep_attention(config: EngineConfig, kept: AttentionBackend, groups: Groups) -> None:
    """The part of a rank that has attention already in `make_attention` of one that starts anew:
    collective alike. Raises `RankMismatch` when that one cannot have the same.
    """
    if config.runner.attention_backend == SDPA:
        return
    is_flashinfer = isinstance(kept, FlashInfer)
    if min(gather_ints(groups, int(is_flashinfer))) != int(is_flashinfer):
        raise RankMismatch(
            f"this rank attends with {FLASHINFER}, which does not work on one that started anew"
        )


def _sizes(config: EngineConfig, features: DecoderFeatures) -> AttentionSizes:
    model, num_members = config.model, config.parallel.tensor_parallel_size
    scale = features.attention_scale
    return AttentionSizes(
        num_heads=model.num_attention_heads // num_members,
        num_kv_heads=local_kv_heads(model, num_members),
        head_dim=model.head_dim,
        scale=model.head_dim**-0.5 if scale is None else scale,
        dtype=getattr(torch, model.dtype),
    )


def find_flashinfer(
    model: ModelConfig, sizes: AttentionSizes, window: Window | None, device: torch.device
) -> FlashInfer | str:
    """Imported and tried, or why it does not work."""
    try:
        made = FlashInfer(importlib.import_module(FLASHINFER), sizes, device)
        difference = check_attention(made, model, sizes, window, device)
    except Exception as error:
        # Its import and its compiler fail in many ways.
        first_line = (str(error).splitlines() or [""])[0].strip()
        return f"{type(error).__name__}: {first_line}".removesuffix(": ")
    if difference is not None:
        return difference
    return made


@torch.inference_mode()
def check_attention(
    backend: AttentionBackend,
    model: ModelConfig,
    sizes: AttentionSizes,
    window: Window | None,
    device: torch.device,
) -> str | None:
    """Where `backend` differs from torch's attention; None where it does not. Prompts, pieces of
    prompts and decodes, also as a graph holds them.
    """
    cache = _filled_cache(model, sizes, device)
    for name, query_lens in (("prompts", (3, 1, 20)), ("decodes", (1, 1, 1))):
        batch = _batch(query_lens, device)
        query = _random(7, (sum(query_lens), sizes.num_heads, sizes.head_dim), sizes, device)
        plans = {
            name: backend.plan(batch, BLOCK_SIZE, window, sizes.dtype),
        }
        graph = backend.graph(len(query_lens), 2, BLOCK_SIZE, (window, window))
        if graph is not None and name == "decodes":
            graph.prepare(batch.block_tables, batch.context_lens)
            plans["decodes of a graph"] = graph.plans[1]
        torchs = TorchAttention().plan(batch, BLOCK_SIZE, window, sizes.dtype)
        expected = torchs.attend(query, 0, cache, sizes.scale, None)
        for what, plan in plans.items():
            found = plan.attend(query, 0, cache, sizes.scale, None)
            error = float((found.float() - expected.float()).abs().max())
            if not error <= TOLERANCE:
                return f"{what} differ from torch's attention by {error:g}"
    return None


def _filled_cache(model: ModelConfig, sizes: AttentionSizes, device: torch.device) -> KVCache:
    """Of one layer."""
    one_layer, num_heads = replace(model, num_layers=1), sizes.num_kv_heads
    cache = KVCache(one_layer, num_heads, NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, sizes.dtype, device)
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_heads, sizes.head_dim)
    cache.keys[0].copy_(_random(1, shape, sizes, device))
    cache.values[0].copy_(_random(2, shape, sizes, device))
    return cache


def _batch(query_lens: tuple[int, ...], device: torch.device) -> ForwardBatch:
    """Of three requests, whose contexts fill a block, leave one token in it, and more."""
    contexts = (16, 17, 27)
    positions = [
        position
        for count, context in zip(query_lens, contexts, strict=True)
        for position in range(context - count, context)
    ]
    rows = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=rows,
        positions=torch.tensor(positions, device=device),
        slot_mapping=rows,
        query_lens=query_lens,
        context_lens=contexts,
        block_tables=torch.tensor([[5, 0], [2, 7], [4, 1]], device=device),
        logits_indices=rows[:0],
    )


def _random(
    seed: int, shape: tuple[int, ...], sizes: AttentionSizes, device: torch.device
) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, sizes.dtype)
