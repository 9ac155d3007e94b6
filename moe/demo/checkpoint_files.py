"""Writes the demo checkpoint as transformers expects a Qwen3-MoE one."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from moed.moe.demo.chat import CHAT_TEMPLATE, END, END_OF_TEXT
from moed.moe.demo.model import DemoModel, Shape, exported_weights


def write_checkpoint(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end_id, pad_id = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None and pad_id is not None
    write_json(folder / "config.json", model_config(model.shape, end_id, pad_id))
    generation = {"do_sample": False, "eos_token_id": [end_id, pad_id], "pad_token_id": pad_id}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.shape))
    tokenizer.save(str(folder / "tokenizer.json"))
    weights_path = folder / "model.safetensors"
    save_file(exported_weights(model), weights_path, metadata={"format": "pt"})
    weights_path.chmod(0o644)  # save_file keeps it to its owner


def model_config(shape: Shape, end_id: int, pad_id: int) -> dict[str, Any]:
    """The file stores bfloat16; `dtype` asks loaders for float32, in which it was measured."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "eos_token_id": end_id,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.hidden * 2,
        "max_position_embeddings": shape.max_positions,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "output_router_logits": False,
        "pad_token_id": pad_id,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        # The same again for readers of the older spelling.
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": shape.max_positions,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
