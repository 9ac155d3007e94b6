"""Products with weights in the processor's own layout are products all the same."""

import pytest
import torch
import torch.nn.functional as F

from moed.moe.linear import Linear, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 17, 130])
def test_equals_the_plain_product(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 50, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype) if has_bias else None
    rows = torch.randn(num_rows, 50, generator=generator).to(dtype)
    with torch.inference_mode():
        found = Linear(weight, bias)(rows)
    wanted = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype and found.shape == (num_rows, 37)
    error = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error)


def test_only_16_bits_on_a_cpu_are_packed() -> None:
    assert not can_pack(torch.randn(4, 4))
    assert not can_pack(torch.randn(4, 4, device="meta", dtype=torch.bfloat16))
    assert not can_pack(torch.empty(0, 4, dtype=torch.bfloat16))
