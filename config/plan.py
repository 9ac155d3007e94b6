"""What one configuration costs on each rank, and all that speaks against it: for `moed plan`, which
asks about any machine, and for the launch, which asks about its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moed.config import deep_ep_limits as limits
from moed.config.capabilities import ActivationFormat, DeepEPMode
from moed.config.deep_ep_question import dispatch_capacity, num_dispatched_experts
from moed.config.engine_config import EngineConfig
from moed.config.items import Item
from moed.config.kv_layout import kv_layout
from moed.config.machine import Machine
from moed.config.memory import (
    RankMemory,
    dispatch_items,
    moe_bytes_per_rank,
    num_useful_tokens,
    rank_memory,
    workspace_items,
)
from moed.config.refusals import largest_budget_in_memory, refusals
from moed.config.weight_bytes import (
    experts_stay_fp8,
    latent_attention,
    tensor_parallel_size,
    weight_bytes,
)

ADVISED = limits.LOW_LATENCY_ADVISED_TOKENS


@dataclass(frozen=True)
class Budget:
    """B, N, and how far B could go."""

    tokens: int
    why: str
    dispatched: int
    """N: tokens that one rank of the expert-parallel group sends."""
    largest: int | None
    """None: no limit is known."""
    largest_why: str
    needed_qp_depth: int | None
    """`NVSHMEM_QP_DEPTH`; None: the backend has no use for it."""


@dataclass(frozen=True)
class KVCachePlan:
    """The cache of one rank."""

    bytes_per_token: int
    formula: str
    num_bytes: int | None
    """None: known at the start only."""
    why: str
    num_tokens: int | None
    longest: int
    """Tokens of a request at its greatest length."""


@dataclass(frozen=True)
class Plan:
    """One configuration on one machine."""

    config: EngineConfig
    machine: Machine
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    weights: Mapping[str, int]
    dispatch: tuple[Item, ...]
    workspace: tuple[Item, ...]
    memory: RankMemory
    kv_cache: KVCachePlan
    budget: Budget


def make_plan(
    config: EngineConfig, machine: Machine, decided: Mapping[str, tuple[Any, str]]
) -> Plan:
    """`decided` is `resolve()`'s: where B comes from."""
    backend = config.parallel.backend
    return Plan(
        config=config,
        machine=machine,
        refusals=tuple(refusals(config, machine)),
        notes=tuple(_notes(config)),
        weights=weight_bytes(config),
        dispatch=tuple(dispatch_items(config, backend, machine)),
        workspace=tuple(workspace_items(config, backend)),
        memory=rank_memory(config, machine),
        kv_cache=_kv_cache(config, machine),
        budget=_budget(config, machine, decided),
    )


def _kv_cache(config: EngineConfig, machine: Machine) -> KVCachePlan:
    layout = kv_layout(config)
    cache, num_bytes, why = config.cache, rank_memory(config, machine).left, "what is left"
    if cache.num_kv_blocks is not None:
        num_bytes, why = layout.num_bytes(cache.num_kv_blocks), "--num-kv-blocks"
    elif cache.kv_cache_memory_bytes is not None:
        num_bytes, why = cache.kv_cache_memory_bytes, "--kv-cache-memory"
    tokens = None
    if num_bytes is not None:
        num_bytes = max(0, num_bytes)
        tokens = layout.num_tokens(num_bytes)
        useful = num_useful_tokens(config)
        if why == "what is left" and tokens > useful:
            # As the start does: more could never be used.
            tokens, num_bytes = useful, layout.num_bytes(useful // cache.block_size)
            why = f"{config.scheduler.max_num_seqs} requests of the greatest length"
    longest = config.scheduler.max_model_len or config.model.max_position_embeddings
    return KVCachePlan(layout.bytes_per_token, layout.formula, num_bytes, why, tokens, longest)


def _budget(
    config: EngineConfig, machine: Machine, decided: Mapping[str, tuple[Any, str]]
) -> Budget:
    tokens, capacity = config.scheduler.max_num_batched_tokens, dispatch_capacity(config)
    backend = config.parallel.backend
    found = _limits_of_budget(config, machine)
    largest, why = min(found, default=(None, "no limit known"))
    low_latency = backend.deep_ep_mode is DeepEPMode.LOW_LATENCY
    return Budget(
        tokens=tokens,
        why=decided.get("max_num_batched_tokens", (tokens, "as set"))[1],
        dispatched=capacity,
        largest=largest,
        largest_why=why,
        needed_qp_depth=limits.needed_qp_depth(capacity) if low_latency else None,
    )


def _limits_of_budget(config: EngineConfig, machine: Machine) -> list[tuple[int, str]]:
    """Each bound on B, with its reason."""
    moe, backend = config.fused_moe, config.parallel.backend
    ranks, tensor = moe.expert_parallel_size, tensor_parallel_size(config)
    found = []
    if backend.max_tokens_per_rank is not None:
        found.append((backend.max_tokens_per_rank, f"limit of {backend.name}"))
    if backend.deep_ep_mode is DeepEPMode.LOW_LATENCY:
        experts = num_dispatched_experts(config)
        most = limits.most_low_latency_tokens(moe.hidden_size, experts, ranks)
        found.append((most * tensor, "low-latency buffer under 32 GiB"))
        if machine.qp_depth is not None and machine.qp_depth.isdigit():
            most = limits.most_tokens_at_qp_depth(int(machine.qp_depth), ranks)
            found.append((most * tensor, f"NVSHMEM_QP_DEPTH is {machine.qp_depth}"))
    if rank_memory(config, machine).usable is not None:
        found.append((largest_budget_in_memory(config, machine), "memory of a GPU"))
    if config.parallel.device == "cpu" and machine.available_bytes is not None:
        tokens = config.scheduler.max_num_batched_tokens
        needed = moe_bytes_per_rank(config) * config.parallel.num_local_ranks
        found.append((machine.available_bytes * tokens // needed, "memory that is free now"))
    return found


def _notes(config: EngineConfig) -> list[str]:
    """What is worth knowing and refuses nothing."""
    found = []
    model, moe, backend = config.model, config.fused_moe, config.parallel.backend
    quantization = model.hf_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        but = "; its experts stay in FP8" if experts_stay_fp8(config) else ""
        found.append(
            f"the checkpoint is quantised ({method or 'unknown method'}): weights are reckoned in "
            f"{model.dtype}, to which they are converted as they are loaded{but}"
        )
    if latent_attention(model) is not None:
        found.append("the KV cache holds one compressed row a token (MLA), on each rank in full")
    capacity = dispatch_capacity(config)
    if backend.deep_ep_mode is DeepEPMode.LOW_LATENCY and capacity > ADVISED:
        found.append(
            f"{capacity} tokens per rank are more than the {ADVISED} that DeepEP recommends for "
            "its low-latency mode: try it on the hardware before relying on it"
        )
    tokens = config.scheduler.max_num_batched_tokens
    if capacity * tensor_parallel_size(config) > tokens:
        found.append(
            f"buffers are made for {capacity} tokens per rank, a little more than {tokens} need, "
            "as the backend asks for a round number"
        )
    if backend.activation_format is ActivationFormat.BATCHED and moe.expert_parallel_size > 1:
        found.append(
            "with the batched format, buffers follow experts x tokens per rank; more ranks do not "
            "make them smaller"
        )
    return found
