"""An `EngineConfig` for tests, with only the parts that a test cares about given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moed.config.capabilities import ActivationFormat, BackendCapabilities, Rebuild
from moed.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from tests.server_config import SERVER

ANY_BACKEND = BackendCapabilities(
    name="local",
    activation_format=ActivationFormat.STANDARD,
    devices=frozenset({"cpu"}),
    requires_expert_parallel=False,
    applies_router_weights=False,
    collectives_per_layer=0,
    graph_safe=True,
    rebuild=Rebuild.IN_PROCESS,
)


SMALL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def engine_config(
    *,
    backend: BackendCapabilities = ANY_BACKEND,
    ranks: int = 1,
    tensor_parallel_size: int = 1,
    enable_expert_parallel: bool = True,
    path: str = "",
    hf_config: Mapping[str, Any] | None = None,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    enable_chunked_prefill: bool = True,
    block_size: int = 4,
    num_kv_blocks: int | None = 64,
    kv_cache_memory_bytes: int | None = None,
    max_position_embeddings: int = 256,
    fault_injection: str | None = None,
    graph_buckets: tuple[int, ...] = (),
    step_ahead: bool = False,
    enable_prefix_caching: bool = True,
) -> EngineConfig:
    """`hf_config` (a config.json) fills the sizes of the model; without it they are small."""
    hf = hf_config or {**SMALL, "max_position_embeddings": max_position_embeddings}
    return EngineConfig(
        model=ModelConfig(
            path=path,
            model=path or "tests",
            revision=None,
            served_model_names=("tests",),
            architecture=hf["architectures"][0],
            model_type=hf["model_type"],
            dtype="float32",
            load_format="auto" if path else "dummy",
            seed=0,
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            vocab_size=hf["vocab_size"],
            num_experts=next(
                hf[name]
                for name in ("num_local_experts", "n_routed_experts", "num_experts")
                if name in hf
            ),
            top_k=hf["num_experts_per_tok"],
            moe_intermediate_size=hf.get("moe_intermediate_size") or hf["intermediate_size"],
            max_position_embeddings=hf["max_position_embeddings"],
            hf_config=hf,
            generation_config={},
        ),
        parallel=ParallelConfig(
            data_parallel_size=ranks,
            tensor_parallel_size=tensor_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            num_local_ranks=ranks * tensor_parallel_size,
            backend=backend,
            device="cpu",
            num_threads=1,
            distributed_timeout_s=30.0,
            agreement_backend="gloo",
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=enable_chunked_prefill,
            max_num_queued_requests=1000,
        ),
        cache=CacheConfig(
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=enable_prefix_caching,
        ),
        runner=RunnerConfig(
            attention_backend="sdpa",
            cpu_kernels="auto",
            graph_buckets=graph_buckets,
            step_ahead=step_ahead,
        ),
        server=replace(
            SERVER,
            shutdown_timeout_s=1.0,
            log_level="info",
            # There is no launcher to wait for.
            recovery=replace(SERVER.recovery, on_rank_failure="exit"),
        ),
        fault_injection=fault_injection,
    )
