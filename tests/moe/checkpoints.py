"""Small random checkpoints, made by `transformers`, which is also the truth about them."""

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
    # Without norms of query and key, larger weights make attention so sharp that rounding shows.
    "mixtral": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "initializer_range": 0.15,
    },
}


def make_model(family: str, *, num_experts: int = 8, seed: int = 0, **changes: Any) -> Any:
    """A float32 model of `family`, with `changes` to its config; the same for the same arguments.

    Norm weights and biases are random too, so that leaving one out shows.
    """
    # Here, since ranks that only need prompts should not wait for it.
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes = {**_COMMON, **_OF_FAMILY[family]}
    sizes["num_local_experts" if family == "mixtral" else "num_experts"] = num_experts
    sizes["num_experts_per_tok"] = min(sizes["num_experts_per_tok"], num_experts)
    sizes |= changes
    torch.manual_seed(seed)
    model: Any
    match family:
        case "qwen3_moe":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        case "qwen2_moe":
            model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
        case _:
            model = MixtralForCausalLM(MixtralConfig(**sizes))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model.to(torch.float32).eval()


def make_checkpoint(family: str, folder: pathlib.Path, **arguments: Any) -> Any:
    """Save `make_model(family, **arguments)` in `folder` and return it."""
    model = make_model(family, **arguments)
    model.save_pretrained(folder)
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
