"""An `EngineConfig` for the front end, with only the parts that a test cares about given."""

import dataclasses
import pathlib
from collections.abc import Mapping
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

BACKEND = BackendCapabilities(
    name="all2allv",
    activation_format=ActivationFormat.STANDARD,
    devices=frozenset({"cpu"}),
    requires_expert_parallel=True,
    applies_router_weights=False,
    collectives_per_layer=4,
    graph_safe=False,
    rebuild=Rebuild.IN_PROCESS,
)


def frontend_config(
    folder: pathlib.Path,
    *,
    vocab_size: int = 400,
    ranks: int = 2,
    eos_token_ids: tuple[int, ...] = (),
    generation_config: Mapping[str, Any] | None = None,
    names: tuple[str, ...] = ("tiny", "org/tiny-moe"),
    max_num_seqs: int = 64,
    max_num_queued_requests: int = 256,
    **server: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path=str(folder),
            model=str(folder),
            revision=None,
            served_model_names=names,
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            dtype="float32",
            load_format="dummy",
            seed=0,
            num_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=vocab_size,
            num_experts=8,
            top_k=2,
            moe_intermediate_size=128,
            max_position_embeddings=512,
            hf_config={},
            generation_config=dict(generation_config or {}),
            eos_token_ids=eos_token_ids,
        ),
        parallel=ParallelConfig(
            data_parallel_size=ranks,
            tensor_parallel_size=1,
            enable_expert_parallel=True,
            num_local_ranks=ranks,
            backend=BACKEND,
            device="cpu",
            num_threads=1,
            distributed_timeout_s=30.0,
            agreement_backend="gloo",
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=64,
            max_num_seqs=max_num_seqs,
            max_model_len=512,
            enable_chunked_prefill=True,
            max_num_queued_requests=max_num_queued_requests,
        ),
        cache=CacheConfig(
            block_size=16,
            num_kv_blocks=64,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
        ),
        runner=RunnerConfig(
            attention_backend="sdpa", cpu_kernels="auto", graph_buckets=(), step_ahead=False
        ),
        server=dataclasses.replace(SERVER, **server),
    )
