"""Finding `deep_ep`, which needs a GPU's libraries and may fail in many ways when imported."""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class DeepEP:
    """The installed package."""

    module: ModuleType
    has_elastic_buffer: bool
    """False for versions before 2, which know `Buffer` alone."""


@dataclass(frozen=True)
class Unavailable:
    """Why there is none to use."""

    reason: str


def find_deep_ep() -> DeepEP | Unavailable:
    """Import it, or say why that does not work. Never raises."""
    try:
        module = importlib.import_module("deep_ep")
    except Exception as error:
        # Its import looks for libraries and compilers and asserts what it finds.
        first_line = (str(error).splitlines() or [""])[0].strip()
        return Unavailable(f"{type(error).__name__}: {first_line}".removesuffix(": "))
    if not hasattr(module, "Buffer"):
        return Unavailable("the installed deep_ep has no class Buffer")
    return DeepEP(module, hasattr(module, "ElasticBuffer"))
