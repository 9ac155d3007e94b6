"""Checkpoints of laptop size with random weights and a tokenizer: for speed, not for meaning.

python -m tests.benchmarks.checkpoint FOLDER [--shape mid|wide]
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 32_000
SHAPES: dict[str, dict[str, Any]] = {
    # 139 M parameters, 34 M of them active.
    "mid": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    },
    # 117 M parameters, 73 M of them active.
    "wide": {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path, shape: str) -> None:
    """A Qwen3-MoE in bfloat16 that every server of such models can load."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary_size, end_id = _write_tokenizer(folder)
    sizes = SHAPES[shape]
    config = Qwen3MoeConfig(
        vocab_size=vocabulary_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=8192,
        intermediate_size=2 * sizes["hidden_size"],
        tie_word_embeddings=False,
        eos_token_id=end_id,
        bos_token_id=None,
        initializer_range=0.05,
        **sizes,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> tuple[int, int]:
    """Trained on Python's own library; returns its size and the id that ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast), fast.eos_token_id


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in [*sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))]:
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="mid")
    given = parser.parse_args()
    write_checkpoint(given.folder, given.shape)


if __name__ == "__main__":
    main()
