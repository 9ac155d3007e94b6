"""The compiled kernels: which of them this processor can run, and how they are called.

One file is built for each instruction set (setup.py); the best that the processor knows is loaded,
or none, and then torch computes everything.
"""

import ctypes
import importlib.machinery
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moed.config.errors import ConfigError

logger = logging.getLogger(__name__)

AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3")
# File, what it is called in words, and what the processor must offer; the best first.
INSTRUCTION_SETS = (
    ("kernels_avx512_bf16", "AVX-512 with bfloat16", (*AVX512, "avx512_bf16")),
    ("kernels_avx512", "AVX-512", AVX512),
    ("kernels_avx2", "AVX2", ("avx2", "fma3")),
)
FOLDER = Path(__file__).parent
DTYPES = (torch.float32, torch.bfloat16)

Pointer = ctypes.c_void_p
Int = ctypes.c_int64


class Matrix(ctypes.Structure):
    """See matmul.h."""

    _fields_ = [("packed", Pointer), ("bias", Pointer), ("num_outputs", Int), ("num_inputs", Int)]


class RouterLayer(ctypes.Structure):
    """See kernels.cpp and attention.h, as of all below."""

    _fields_ = [
        ("weight", Matrix),
        ("norm", Pointer),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("top_k", Int),
        ("renormalize", Int),
    ]


class ExpertLayer(ctypes.Structure):
    _fields_ = [
        ("gate_up", Pointer),
        ("down", Pointer),
        ("num_experts", Int),
        ("hidden_size", Int),
        ("size", Int),
        ("rows_per_slot", Pointer),
    ]


class AttentionLayer(ctypes.Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        ("input_norm", Pointer),
        ("head_norm", Pointer),
        ("sinks", Pointer),
        ("num_heads", Int),
        ("num_kv_heads", Int),
        ("head_dim", Int),
        ("num_rotated", Int),
        ("is_interleaved", Int),
        ("norm_after_rotary", Int),
        ("window", Int),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
    ]


class StepState(ctypes.Structure):
    _fields_ = [
        ("num_tokens", Int),
        ("block_size", Int),
        ("table_width", Int),
        ("positions", Pointer),
        ("slots", Pointer),
        ("cosine", Pointer),
        ("sine", Pointer),
        ("num_pieces", Int),
        ("pieces", Pointer),
        ("tables", Pointer),
    ]


class Arguments(ctypes.Structure):
    _fields_ = [("is_bf16", Int), ("num_threads", Int)]


class Library:
    """The functions of one file, which release the GIL. Pointers must stay valid during a call."""

    def __init__(self, path: Path, instruction_set: str) -> None:
        """Raises `OSError` or `AttributeError` where the file is not as built for."""
        self.instruction_set = instruction_set
        own = ctypes.CDLL(str(path))

        def function(name: str, *arguments: Any) -> Callable[..., None]:
            found = getattr(own, name)
            found.argtypes, found.restype = [Pointer, *arguments], None
            called: Callable[..., None] = found
            return called

        # arguments, rows, bytes of a row, number of rows, units in a row, packed, bytes of a group
        self.pack = function("moed_pack", Pointer, Int, Int, Int, Pointer, Int)
        # arguments, weight, input, rows, out
        self.linear = function("moed_linear", Pointer, Pointer, Int, Pointer)
        # arguments, input, weight, rows, size, eps, out
        self.norm = function("moed_norm", Pointer, Pointer, Int, Int, ctypes.c_float, Pointer)
        # arguments, layer, hidden, tokens, normed, weights, ids
        self.route = function("moed_route", Pointer, Pointer, Int, Pointer, Pointer, Pointer)
        # arguments, layer, hidden, ids, weights, rows, top-k, out
        self.experts = function(
            "moed_experts", Pointer, Pointer, Pointer, Pointer, Int, Int, Pointer
        )
        # arguments, layer, step, query, keys, values, out
        self.attend = function("moed_attend", *[Pointer] * 6)
        # arguments, layer, step, hidden, query, attended, keys, values
        self.attention = function("moed_attention", *[Pointer] * 7)
        # arguments, seeds, output indices, how many, out
        self.uniform = function("moed_uniform", Pointer, Pointer, Int, Pointer)
        # arguments, logits, vocabulary, drawings, number of drawings, out
        self.draw = function("moed_draw", Pointer, Int, Pointer, Int, Pointer)


@cache
def arguments_of(dtype: torch.dtype, num_threads: int) -> Any:
    """The first argument of every function, for tensors of `dtype`."""
    made = Arguments(int(dtype == torch.bfloat16), num_threads)
    _KEPT.append(made)
    return ctypes.addressof(made)


_KEPT: list[Arguments] = []


def arguments(dtype: torch.dtype) -> Any:
    """The same for as many threads as torch uses now."""
    return arguments_of(dtype, torch.get_num_threads())


_choice = "auto"


def use_kernels(choice: str) -> None:
    """What models that are built from now on compute with: "native", "torch", or "auto", which is
    native where that can be. Raises `ConfigError` when "native" cannot be.
    """
    global _choice
    if choice == "native" and isinstance(found := found_library(), str):
        raise ConfigError(f"cpu_kernels is 'native', and {found}; take 'auto' or 'torch'")
    _choice = choice


def library() -> Library | None:
    """The kernels to compute with, None for torch's."""
    if _choice == "torch":
        return None
    found = found_library()
    return None if isinstance(found, str) else found


def describe() -> str:
    """Which kernels are in use, in words."""
    if _choice == "torch":
        return "torch"
    found = found_library()
    return f"torch: {found}" if isinstance(found, str) else f"native, {found.instruction_set}"


@cache
def found_library() -> Library | str:
    """The best that runs here, or why none does. A file that the processor cannot run is never
    opened.
    """
    offered = torch.cpu.get_capabilities()
    is_known = False
    for name, instruction_set, wanted in INSTRUCTION_SETS:
        if not all(offered.get(feature) for feature in wanted):
            continue
        is_known = True
        path = built_file(name)
        if path is None:
            continue
        try:
            return Library(path, instruction_set)
        except (OSError, AttributeError) as error:
            return f"the native kernels cannot be loaded ({error})"
    if is_known:
        return "the native kernels were not built (no C++ compiler at install)"
    return "there are no native kernels for this processor"


def built_file(name: str) -> Path | None:
    """Where it lies, or None."""
    candidates = (FOLDER / f"{name}{end}" for end in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)
