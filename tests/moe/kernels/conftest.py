"""Kernels run on a GPU where there is one, and in triton's interpreter elsewhere."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def small_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter does wrongly with 16 and 8 bits, numpy having no such types: it
    truncates to bfloat16, loses the carry when it rounds to FP8, and multiplies the bits of
    bfloat16 as whole numbers.
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime import interpreter

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(data))
        converted = bits.view(torch_dtype(source)).to(torch_dtype(target))
        unsigned = getattr(torch, f"uint{target.primitive_bitwidth}")
        return converted.view(unsigned).numpy().reshape(data.shape)

    def torch_dtype(dtype: Any) -> torch.dtype:
        names = {"bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn", "fp16": "float16"}
        found: torch.dtype = getattr(torch, names.get(dtype.name, "float32"))
        return found

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        data = convert(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    multiply = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, left, right, *rest: multiply(self, widened(left), widened(right), *rest),
    )
