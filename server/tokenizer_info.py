"""What a client needs to know of the tokenizer to have no copy of its own: `/tokenizer_info`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from moed.server.chat_template import ChatTemplate, read_json, special_tokens
from moed.server.tokenizer import TextTokenizer


def tokenizer_info(
    folder: str,
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    eos_token_ids: Sequence[int],
) -> Mapping[str, Any]:
    """tokenizer_config.json, with special tokens as text and the chat template as it is used. There
    is always an `eos_token` (null where the model has none). Raises `ModelError`.
    """
    config = read_json(pathlib.Path(folder) / "tokenizer_config.json")
    named = special_tokens(config)
    ends = [tokenizer.token_name(token_id) for token_id in eos_token_ids]
    return {
        "bos_token": None,
        "eos_token": ends[0] if ends else None,
        "pad_token": None,
        **config,
        **named,
        "chat_template": None if template is None else template.source,
        "vocab_size": tokenizer.size,
    }
