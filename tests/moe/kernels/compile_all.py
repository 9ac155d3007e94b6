"""Compiles every kernel for real GPUs, as far as machine code; none is needed for that.

    python -m tests.moe.kernels.compile_all 80:bf16 90:bf16 90:fp8e4nv

Each argument is a compute capability and a type of weights: bf16, fp16, fp32, or fp8e4nv, which
needs 89. Prints one line for each kernel. Run without triton's interpreter.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moed.moe.kernels import grouped, masked, quantize
from moed.moe.kernels.launch import tiling_for

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may use, by compute capability (CUDA programming guide)."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}
POINTERS = {
    "ids": "*i64",
    "pairs": "*i64",
    "starts": "*i32",
    "block_experts": "*i32",
    "block_starts": "*i32",
    "num_rows_per_expert": "*i32",
}
OPTIONS = ("num_warps", "num_stages")
# Numbers that are multiples of 16 in a real launch; triton compiles other code for others.
SIZES = ("size", "depth", "num_columns")


def products(dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each kernel, with its constants, in the smallest and the largest tiling."""
    for num_rows in (1, 1000):
        for module in (grouped, masked):
            for kernel in (module.gate_up_kernel, module.down_kernel):
                yield kernel, tiling_for(num_rows).options(dtype)


def others(dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    if dtype == torch.float8_e4m3fn:
        constants = {"BLOCK_M": 16, "GROUP": 128, "LARGEST": 448.0, "SMALLEST": 1e-4}
        yield quantize.quantize_kernel, constants
    else:
        yield grouped.sum_choices_kernel, {"BLOCK_N": 1024, "APPLY_WEIGHTS": True}


def pointers(kernel: Any, kind: str) -> dict[str, str]:
    """The types of all pointers of a kernel."""
    is_fp8 = kind == "fp8e4nv"
    plain, scales = ("*bf16", "*fp32") if is_fp8 else (f"*{kind}", f"*{kind}")
    found = dict.fromkeys(("hidden", "active", "weights", "values"), f"*{kind}")
    found |= dict.fromkeys(("inputs", "output", "results"), plain)
    found |= dict.fromkeys(("hidden_scales", "active_scales", "weight_scales", "scales"), scales)
    if kernel is grouped.sum_choices_kernel:
        found["weights"] = "*fp32"
    return found | POINTERS


def compile_one(kernel: Any, constants: dict[str, Any], kind: str, capability: int) -> None:
    options = {name: value for name, value in constants.items() if name in OPTIONS}
    given = {name: value for name, value in constants.items() if name not in OPTIONS}
    types = pointers(kernel, kind)
    signature = {
        name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in types or name in SIZES or name.endswith("_stride")
    }
    source = ASTSource(kernel, signature, given, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    name = f"{kernel.__module__}.{kernel.__name__} {kind} {capability} {constants}"
    assert compiled.asm["cubin"], name
    assert compiled.metadata.shared <= SHARED_KIB[capability] * 1024, (
        name,
        compiled.metadata.shared,
    )
    print(name, compiled.metadata.shared)


def main() -> None:
    for argument in sys.argv[1:]:
        capability, kind = argument.split(":")
        for kernel, constants in (*products(DTYPES[kind]), *others(DTYPES[kind])):
            compile_one(kernel, constants, kind, int(capability))


if __name__ == "__main__":
    main()
