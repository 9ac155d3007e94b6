"""Attention that does not see the whole context."""

from dataclasses import dataclass
from typing import Any, TypeVar

from moed.config.engine_config import ModelConfig

Position = TypeVar("Position")

# Model types some of whose layers have a window, with its size where config.json does not say.
GPT_OSS_WINDOW = 128
LLAMA4_WINDOW = 8192
LOCAL_KINDS = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class Window:
    """What a token sees of the tokens before it."""

    size: int
    """It sees itself and at most `size` - 1 others."""
    is_aligned: bool = False
    """Windows lie side by side, and it sees what is before it in its own; else the window slides,
    and it sees the last ones.
    """

    def first_seen(self, position: Position) -> Position:
        """The first position that the token at `position` sees, which may be below 0. Numbers, or
        tensors of them.
        """
        number: Any = position
        before = self.size - 1
        first: Position = number // self.size * self.size if self.is_aligned else number - before
        return first


@dataclass(frozen=True)
class WindowLayers:
    """Which layers have a window."""

    window: Window
    has_window: tuple[bool, ...]
    """By layer."""

    @property
    def are_some(self) -> bool:
        """Whether there are layers with and without."""
        return any(self.has_window) and not all(self.has_window)


def window_layers(model: ModelConfig) -> WindowLayers | None:
    """None for model types in which no layer differs from the others."""
    config, layers = model.hf_config, range(model.num_layers)
    kinds = config.get("layer_types")
    match model.model_type:
        case "gpt_oss":
            window = Window(int(config.get("sliding_window") or GPT_OSS_WINDOW))
            own = [layer % 2 == 0 for layer in layers]
        case "llama4_text":
            size = config.get("attention_chunk_size", LLAMA4_WINDOW)
            if size is None:
                return None
            window = Window(int(size), is_aligned=True)
            own = rotary_layers(model)
        case _:
            return None
    if kinds:
        own = [kind in LOCAL_KINDS for kind in kinds]
    return WindowLayers(window, tuple(own))


def layers_with_own_blocks(model: ModelConfig) -> WindowLayers | None:
    """Where only some layers have a window, those hold KV blocks of their own; None elsewhere."""
    windows = window_layers(model)
    return windows if windows is not None and windows.are_some else None


def rotary_layers(model: ModelConfig) -> list[bool]:
    """By layer of a Llama 4: whether queries and keys are rotated."""
    config = model.hf_config
    if listed := config.get("no_rope_layers"):
        return [bool(rotates) for rotates in listed]
    every = int(config.get("no_rope_layer_interval") or 4)
    return [(layer + 1) % every != 0 for layer in range(model.num_layers)]
