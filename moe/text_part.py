"""Which tensors of a multimodal checkpoint are its text part, and how the text model alone would
name them.
"""

from collections.abc import Iterable

from moed.config.errors import ModelError

# Prefixes as they are stored, of the model and of its head: as a model around a language model
# has them, as a model with a language model inside, and with other parts beside `model.`.
LAYOUTS = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    ("model.", "lm_head."),
)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """From the text model's own names to those that are `stored`.

    Raises `ModelError` when no known prefix leads to an embedding of tokens.
    """
    names = set(stored)
    for model, head in LAYOUTS:
        if f"{model}embed_tokens.weight" not in names:
            continue
        own = {f"model.{n.removeprefix(model)}": n for n in names if n.startswith(model)}
        heads = {f"lm_head.{n.removeprefix(head)}": n for n in names if n.startswith(head)}
        return own | heads
    known = ", ".join(model for model, _ in LAYOUTS)
    raise ModelError(
        f"no embed_tokens.weight lies below any of {known}: the text part of this multimodal "
        "checkpoint is not found"
    )
