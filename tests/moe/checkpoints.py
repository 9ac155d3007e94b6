"""Small random checkpoints, made by `transformers`, which is also the truth about them."""

import json
import pathlib
from typing import Any

import torch

VOCAB_SIZE = 97
NUM_LAYERS = 3

# Weights large enough that greedy choices are decisive and depend on the whole context.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# With sizes that differ, so that none can stand for another.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "initializer_range": 0.25,
    },
    "olmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "clip_qkv": 2.5,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "granitemoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "initializer_range": 0.15,
    },
    "granitemoeshared": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "initializer_range": 0.15,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        "num_mtp_layers": 0,
    },
    "solar_open": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "sliding_window": 8,
        "attention_bias": True,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **_LATENT,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 64,
        },
    },
    "kimi_k2": {
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.8,
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
        "v_head_dim": 28,
        "rope_interleave": False,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * NUM_LAYERS,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "initializer_range": 0.15,
    },
    "hunyuan_v1_moe": {
        "num_experts": 8,
        "moe_topk": 3,
        "intermediate_size": 32,
    },
    # A large jitter, so that several experts come near the best one.
    "phimoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.3,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 50,
        "initializer_range": 0.15,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.4],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
            "short_mscale": 1.2,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 512,
        },
    },
    # Windows, and steps of the temperature, that a prompt passes several times.
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 4,
        "moe_layers": [1, 2, 3],
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 24,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "attn_scale": 0.4,
    },
    # Without norms of query and key, larger weights make attention so sharp that rounding shows.
    "mixtral": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "initializer_range": 0.15,
    },
}

# Its matrices lie either way round, which their sizes must tell.
_OF_FAMILY["qwen3_vl_moe_text"] = {
    **_OF_FAMILY["qwen3_moe"],
    "moe_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_OF_FAMILY["glm4v_moe_text"] = {
    **_OF_FAMILY["glm4_moe"],
    "use_qk_norm": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
# Families that are the text part of another model, and no model of their own in `transformers`.
_WHOLE_OF = {"qwen3_vl_moe_text": "qwen3_vl_moe", "glm4v_moe_text": "glm4v_moe"}
_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Of the part that sees, as small as may be.
_VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        **{"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2},
        **{"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
    "glm4v_moe": {
        **{"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2},
        **{"out_hidden_size": 64, "image_size": 28, "patch_size": 14},
    },
    "llama4": {
        **_EYES,
        **{"intermediate_size": 128, "vision_output_dim": 32},
        **{"projector_input_dim": 32, "projector_output_dim": 32},
    },
    "mistral3": {**_EYES, "model_type": "pixtral", "head_dim": 16},
    "kimi_k25": {
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "patch_size": 14},
    },
}

# Families that `transformers` computes as another.
_CLASS_OF = {"kimi_k2": "deepseek_v3"}


def make_model(
    family: str, *, num_experts: int = 8, seed: int = 0, whole: str | None = None, **changes: Any
) -> Any:
    """A float32 model of `family`, with `changes` to its config; the same for the same arguments.
    It may be the text part of a multimodal one, `whole`.

    Norm weights and biases are random too, so that leaving one out shows.
    """
    # Here, since ranks that only need prompts should not wait for it.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sizes = {**_COMMON, **_OF_FAMILY[family]}
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if name in sizes:
            sizes[name] = num_experts
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        if name in sizes:
            sizes[name] = min(sizes[name], num_experts)
    sizes |= changes
    torch.manual_seed(seed)
    whole = whole or _WHOLE_OF.get(family)
    model: Any
    if whole is None:
        config = AutoConfig.for_model(_CLASS_OF.get(family, family), **sizes)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    else:
        text = {"pad_token_id": 0, **sizes}
        if family not in _WHOLE_OF:
            text["model_type"] = _CLASS_OF.get(family, family)
        parts = {"text_config": text, "vision_config": _VISION[whole]}
        config = AutoConfig.for_model(
            whole, **parts, tie_word_embeddings=sizes["tie_word_embeddings"]
        )
        model = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            elif name.endswith(("bias", "sinks")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        # Of the same size as differences between scores, so that they decide some choices.
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval()


def make_checkpoint(family: str, folder: pathlib.Path, **arguments: Any) -> Any:
    """Save `make_model(family, **arguments)` in `folder` and return it."""
    model = make_model(family, **arguments)
    model.save_pretrained(folder)
    if family in _CLASS_OF:
        path = folder / "config.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(written | {"model_type": family}), encoding="utf-8")
    return model


@torch.inference_mode()
def true_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), V] float32, in one forward pass without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits.float()


@torch.inference_mode()
def true_greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` by argmax, each from a whole forward pass."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(true_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
