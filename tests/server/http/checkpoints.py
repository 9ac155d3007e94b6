"""Small folders that look like checkpoints to the front end: tokenizer and chat template only."""

import json
import pathlib
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TAG = "<tool_call>"

CHATML = (
    "{%- if not messages %}{{ raise_exception('there is nothing to answer') }}{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. The answer is forty two.",
    "hello world, hello there; one two three four five six seven eight nine ten",
    "A stop string may cross several tokens, and so may any other string.",
] * 4


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is known to be there."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE as Qwen has it: an emoji takes several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 4,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    special = [AddedToken(text, special=True) for text in (END_OF_TEXT, START, END)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(TOOL_TAG, special=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """BPE with byte fallback and a BOS token, as Mixtral has it: `▁` is a space."""
    words = ["▁hello", "▁world", "hello", "▁", "▁the", "▁answer", "▁is", "a", "b", "c", "l", "o"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in words:
        for letter in word:
            vocab.setdefault(letter, len(vocab))
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_checkpoint(folder: pathlib.Path, tokenizer: Tokenizer, **config: Any) -> pathlib.Path:
    """tokenizer.json and tokenizer_config.json with `config` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
