"""Quantised numbers come back as their writers define them: by hand, against references number by
number, and against `transformers` where it can.
"""

import pytest
import torch

from moed.config.quantization import Quantization, StoredFormat
from moed.moe.dequantize import (
    dequantize_fp8_block,
    dequantize_int4,
    dequantize_mxfp4,
    reference_fp8_block,
    reference_int4,
    reference_mxfp4,
)
from moed.moe.quantization import stored_weights
from tests.moe.quantized import INT4_GROUP_SIZE, to_fp8_block, to_int4, to_mxfp4


def random(*shape: int) -> torch.Tensor:
    """Of very different sizes by row."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return weight * torch.arange(1, shape[-2] + 1)[:, None] / 8


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (3, 5)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_equals_the_reference(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    parts = to_fp8_block(random(*shape))
    scales = parts["_scale_inv"].to(scale_dtype)
    found = dequantize_fp8_block(parts[""], scales)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_fp8_block(parts[""], scales), rtol=0, atol=0)


def test_fp8_by_hand() -> None:
    """Rows 127 and 128 are of different blocks, and so are columns 127 and 128."""
    values = torch.full((129, 129), 0.5).to(torch.float8_e4m3fn)
    found = dequantize_fp8_block(values, torch.tensor([[2.0, 4.0], [6.0, 8.0]]))
    assert found[127, 127:].tolist() == [1.0, 2.0]
    assert found[128, 127:].tolist() == [3.0, 4.0]


def test_fp8_equals_transformers() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    parts = to_fp8_block(random(256, 384))
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(
        parts[""], parts["_scale_inv"], torch.float32
    )
    torch.testing.assert_close(dequantize_fp8_block(*parts.values()), expected)


@pytest.mark.parametrize("shape", [(1, 32), (7, 96)])
def test_mxfp4_equals_the_reference(shape: tuple[int, int]) -> None:
    parts = to_mxfp4(random(*shape))
    found = dequantize_mxfp4(*parts.values())
    torch.testing.assert_close(found, reference_mxfp4(*parts.values()), rtol=0, atol=0)


def test_mxfp4_by_hand() -> None:
    """Byte 0x7A: the lower column is 0b1010, -1, the next 0b0111, 6; scale 128 is 2."""
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 1, 0] = 0x7A
    found = dequantize_mxfp4(blocks, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert found[0, 32:35].tolist() == [-2.0, 12.0, 0.0]
    assert found[0, :32].tolist() == [0.0] * 32


@pytest.mark.parametrize(("scale", "factor"), [(0, 2.0**-127), (127, 1.0), (254, 2.0**127)])
def test_mxfp4_scales_reach_both_ends(scale: int, factor: float) -> None:
    blocks = torch.full((1, 1, 16), 0x22, dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, torch.tensor([[scale]], dtype=torch.uint8))
    assert found.tolist() == [[factor] * 32]


def test_mxfp4_scale_255_is_not_a_number() -> None:
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, torch.tensor([[255, 127]], dtype=torch.uint8))
    assert found[0, :32].isnan().all() and not found[0, 32:].isnan().any()


def test_mxfp4_equals_transformers() -> None:
    """Which returns the columns first, as its products want them."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    parts = to_mxfp4(random(3, 6, 64))
    expected = mxfp4.convert_moe_packed_tensors(*parts.values(), dtype=torch.float32)
    torch.testing.assert_close(dequantize_mxfp4(*parts.values()), expected.transpose(1, 2))


@pytest.mark.parametrize("shape", [(1, 16), (5, 48)])
def test_int4_equals_the_reference(shape: tuple[int, int]) -> None:
    parts = to_int4(random(*shape))
    arguments = (parts["_packed"], parts["_scale"], shape[1], INT4_GROUP_SIZE)
    torch.testing.assert_close(
        dequantize_int4(*arguments), reference_int4(*arguments), rtol=0, atol=0
    )


def test_int4_by_hand() -> None:
    """Word 0xF0000A78 from its lowest nibble: 8, 7, 10, 0, 0, 0, 0, 15 less 8 each. Ten columns in
    groups of four: the last group is short, and so is the last word.
    """
    words = torch.tensor([[0xF0000A78 - 2**32, 0x00000009]], dtype=torch.int32)
    found = dequantize_int4(words, torch.tensor([[1.0, 10.0, 100.0]]), 10, 4)
    assert found.tolist() == [[0, -1, 2, -8, -80, -80, -80, 70, 100, -800]]


@pytest.mark.parametrize("stored_format", list(StoredFormat))
def test_leading_dims_are_kept(stored_format: StoredFormat) -> None:
    """The experts of a layer in one tensor give what they give one by one."""
    weight = random(3, 144, 160)
    writer = {"fp8": to_fp8_block, "mxfp4": to_mxfp4, "int4": to_int4}[stored_format]
    size = {"fp8": 128, "mxfp4": 32, "int4": INT4_GROUP_SIZE}[stored_format]
    stored = stored_weights(Quantization(stored_format, size))
    assert stored is not None
    each = [writer(expert) for expert in weight]
    kept = [part.suffix for part in stored.parts(weight.shape)]
    alone = [stored.dequantize([parts[s] for s in kept], weight.shape[1:]) for parts in each]
    joined = [torch.stack([parts[suffix] for parts in each]) for suffix in kept]
    together = stored.dequantize(joined, weight.shape)
    assert together.shape == weight.shape
    assert torch.equal(together, torch.stack(alone))
    for part, tensor in zip(stored.parts(weight.shape), joined, strict=True):
        assert part.shape == tensor.shape


def test_plain_weights_have_no_format() -> None:
    assert stored_weights(None) is None


def test_weights_that_cannot_lie_in_a_format() -> None:
    fp8 = stored_weights(Quantization(StoredFormat.FP8_BLOCK, 128))
    mxfp4 = stored_weights(Quantization(StoredFormat.MXFP4, 32))
    assert fp8 is not None and mxfp4 is not None
    assert "no blocks" in (fp8.obstacle((64,)) or "")
    assert "40 columns" in (mxfp4.obstacle((8, 40)) or "")
