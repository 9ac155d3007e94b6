"""Declarations of backends that call DeepEP, and config.json files of known models, for tests."""

from collections.abc import Mapping
from typing import Any

from moed.config.capabilities import ActivationFormat, BackendCapabilities, DeepEPMode
from tests.config.conftest import declare

LOW_LATENCY, HIGH_THROUGHPUT, ELASTIC = "low_latency", "high_throughput", "elastic"

QWEN3_30B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def backends() -> dict[str, BackendCapabilities]:
    """Those of torch, and one of each mode of DeepEP under the mode's name."""
    batched = {"activation_format": ActivationFormat.BATCHED, "applies_router_weights": True}
    every = [
        declare("local"),
        declare("all2allv"),
        declare("allgather_reducescatter"),
        declare(LOW_LATENCY, deep_ep_mode=DeepEPMode.LOW_LATENCY, **batched),
        declare(HIGH_THROUGHPUT, deep_ep_mode=DeepEPMode.HIGH_THROUGHPUT),
        declare(ELASTIC, deep_ep_mode=DeepEPMode.ELASTIC),
    ]
    return {entry.name: entry for entry in every}
