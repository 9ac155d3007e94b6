"""config.json of a multimodal model, of which the text part is served: its fields lie in
`text_config`, and some that hold for all parts beside it.
"""

from collections.abc import Mapping
from typing import Any

TEXT = "text_config"
# Of the whole model, even where the text part says otherwise.
OF_THE_WHOLE = ("architectures", "tie_word_embeddings")
# Of the whole model, where the text part says nothing.
OF_ALL_PARTS = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text part of `raw`, a config.json; `raw` itself where it has no parts."""
    text = raw.get(TEXT)
    if not isinstance(text, Mapping):
        return raw
    whole = {name: raw[name] for name in OF_THE_WHOLE if raw.get(name) is not None}
    shared = {name: raw[name] for name in OF_ALL_PARTS if text.get(name) is None and name in raw}
    return {**text, **whole, **shared}
