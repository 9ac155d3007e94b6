"""FP8 weights with a scale per 128 x 128: the kernels equal a product of what was dequantised."""

import pytest
import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import BlockScaled, WeightFormat
from moed.moe.experts import ExpertWeights

pytest.importorskip("triton")

from moed.moe.experts.triton_batched import TritonBatchedExperts  # noqa: E402
from moed.moe.experts.triton_standard import TritonExperts  # noqa: E402
from moed.moe.kernels.quantize import quantize, reference_quantize  # noqa: E402

# More than one block each way, and the last ones not full.
HIDDEN, SIZE, BLOCK = 200, 144, 128
NUM_EXPERTS = 2


@pytest.fixture(autouse=True)
def needs_fp8_products() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no FP8")


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_block(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Each scale as often as it is used: [e, rows, columns]."""
    repeated = scales.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
    return repeated[:, :rows, :columns]


def matrix(seed: int, rows: int, columns: int) -> tuple[BlockScaled, torch.Tensor]:
    """Blocks of very different scales, and the same in float32."""
    values = (random(seed, NUM_EXPERTS, rows, columns) * 40).to(torch.float8_e4m3fn)
    scales = random(seed + 1, NUM_EXPERTS, -(-rows // BLOCK), -(-columns // BLOCK)).exp() / 800
    return BlockScaled(values, scales), values.float() * by_block(scales, rows, columns)


def weights_of(device: torch.device) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    gate, plain_gate = matrix(1, SIZE, HIDDEN)
    up, plain_up = matrix(3, SIZE, HIDDEN)
    down, plain_down = matrix(5, HIDDEN, SIZE)
    gate_up = BlockScaled(
        torch.cat([gate.values.float(), up.values.float()], dim=1).to(gate.values.dtype).to(device),
        torch.cat([gate.scales, up.scales], dim=1).to(device),
    )
    weights = ExpertWeights(gate_up, BlockScaled(down.values.to(device), down.scales.to(device)))
    assert weights.format == WeightFormat.FP8_BLOCK
    return weights, torch.cat([plain_gate, plain_up], dim=1), plain_down


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """[n, K] float32 as it is after quantisation."""
    quantized = reference_quantize(rows)
    return (
        quantized.values.float() * by_block(quantized.scales[:, None], BLOCK, rows.shape[1])[:, 0]
    )


def expected_of(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[n, D] through one expert, inputs of both products quantised."""
    gate, up = (rounded(rows) @ gate_up.T).split_with_sizes([SIZE, SIZE], dim=1)
    return rounded(torch.nn.functional.silu(gate) * up) @ down.T


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """An active value next to a rounding edge may fall to its other side, which shows in a whole
    row: so by norm, tight enough that one wrong scale fails.
    """
    assert (found.cpu() - expected).norm() < 2e-3 * expected.norm()


# The interpreter's remark on the row that nobody asks for.
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_standard(device: torch.device) -> None:
    weights, gate_up, down = weights_of(device)
    hidden = random(7, 5, HIDDEN)
    hidden[3] = torch.nan
    ids = torch.tensor([[0, 1], [1, -1], [0, -1], [-1, -1], [1, 0]])
    router = random(8, 5, 2).abs()
    dispatched = Dispatched(hidden.to(device), ids.to(device), router.to(device), None, None)
    found = TritonExperts(weights)(dispatched, True)
    expected = torch.zeros(5, HIDDEN)
    for expert in range(NUM_EXPERTS):
        rows, choices = torch.where(ids == expert)
        results = expected_of(hidden[rows], gate_up[expert], down[expert])
        expected.index_add_(0, rows, results * router[rows, choices, None])
    assert_alike(found, expected)
    assert torch.equal(found[3].cpu(), torch.zeros(HIDDEN))


def test_batched(device: torch.device) -> None:
    weights, gate_up, down = weights_of(device)
    counts = [0, 17]
    hidden = torch.full((NUM_EXPERTS, 20, HIDDEN), torch.nan)
    hidden[1, :17] = random(9, 17, HIDDEN)
    num_rows = torch.tensor(counts, dtype=torch.int32, device=device)
    found = TritonBatchedExperts(weights)(
        Dispatched(hidden.to(device), None, None, num_rows, None), False
    )
    assert_alike(found[1, :17], expected_of(hidden[1, :17], gate_up[1], down[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantized_inputs_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    inputs = torch.full((2, 20, HIDDEN), torch.nan, dtype=dtype)
    inputs[0, :3] = (random(1, 3, HIDDEN) * 1000).to(dtype)
    inputs[1, :18] = random(2, 18, HIDDEN).to(dtype)
    inputs[1, 5] = 0
    num_rows = torch.tensor([3, 18], dtype=torch.int32, device=device)
    found = quantize(inputs.to(device), num_rows)
    for expert, count in enumerate([3, 18]):
        expected = reference_quantize(inputs[expert, :count])
        scales = found.scales[expert, :count].cpu()
        torch.testing.assert_close(scales, expected.scales, rtol=1e-6, atol=0)
        values = found.values[expert, :count].cpu().float()
        # One step of e4m3 apart, where the division fell next to a rounding edge.
        torch.testing.assert_close(values, expected.values.float(), rtol=0.13, atol=2e-3)
        assert (values != expected.values.float()).sum() <= 0.01 * values.numel()


def test_scales_by_hand() -> None:
    """amax 896 is scale 2; channels 128 on are another group; zeros take the smallest scale."""
    inputs = torch.zeros(1, 129)
    inputs[0, 0], inputs[0, 1] = -896.0, 448.0
    found = reference_quantize(inputs)
    assert found.scales.tolist() == [[2.0, pytest.approx(1e-4 / 448)]]
    assert found.values.float()[0, :3].tolist() == [-448.0, 224.0, 0.0]
