"""A clean environment, small checkpoints, and declarations of backends."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moed.config.capabilities import ActivationFormat, BackendCapabilities, Rebuild

QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 999,
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

WriteCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("MOED_", "VLLM_", "HF_TOKEN", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Writes config.json (changes merged into a small Qwen3-MoE's; None removes a field)."""

    def write(generation: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        merged = {**QWEN, **changes}
        content = {key: value for key, value in merged.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def declare(name: str, **changes: Any) -> BackendCapabilities:
    fields: dict[str, Any] = {
        "name": name,
        "activation_format": ActivationFormat.STANDARD,
        "devices": frozenset({"cpu", "cuda"}),
        "requires_expert_parallel": name != "local",
        "applies_router_weights": False,
        "collectives_per_layer": 2,
        "graph_safe": False,
        "rebuild": Rebuild.IN_PROCESS,
    }
    return BackendCapabilities(**{**fields, **changes})


@pytest.fixture
def capabilities() -> dict[str, BackendCapabilities]:
    """As the registry's, and backends with a batched format and with limits."""
    every = [
        declare("local"),
        declare("all2allv"),
        declare("allgather_reducescatter", can_shard_experts=True),
        declare("batched", activation_format=ActivationFormat.BATCHED),
        declare("gpu_only", devices=frozenset({"cuda"})),
        declare("hidden_2048", hidden_sizes=frozenset({2048, 4096})),
        declare("one_expert", max_top_k=1),
        declare("at_most_512", max_tokens_per_rank=512),
    ]
    return {entry.name: entry for entry in every}
