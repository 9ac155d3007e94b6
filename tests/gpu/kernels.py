"""Each kernel against its reference, on the device.

Legend: T rows, D hidden, I intermediate size, e experts, K top-k, C capacity.
"""

import dataclasses

import torch
import torch.nn.functional as F

from moed.dist.all2all.base import Dispatched
from moed.moe.block_scaled import SCALE_BLOCK, BlockScaled
from moed.moe.experts import Experts, ExpertWeights
from tests.gpu.attention import check_attention_backends
from tests.gpu.report import Report
from tests.gpu.setup import Setup

# Of a result's norm. FP8 is compared with the same rounding, of which some falls to other sides.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
FP8_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


LARGE = (Sizes(2048, 768, 128, 8), Sizes(7168, 2048, 8, 4))
TINY = (Sizes(40, 24, 3, 2),)
LARGE_ROWS, TINY_ROWS = (1, 16, 300, 4096), (1, 19)


def run(setup: Setup, report: Report) -> None:
    """All of them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for sizes in TINY if setup.tiny else LARGE:
        _check_plain(setup, report, sizes)
        with report.attempt("FP8 experts"):
            _check_fp8(setup, report, sizes)
    check_attention_backends(setup, report)
    if setup.device == "cuda":
        _check_waits(setup, report)


def normal(seed: int, *shape: int, device: torch.device) -> torch.Tensor:
    """float32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def plain_weights(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Which keep the size of what they multiply."""
    e, size, hidden = sizes.num_experts, sizes.intermediate, sizes.hidden
    gate_up = normal(1, e, 2 * size, hidden, device=device) / hidden**0.5
    down = normal(2, e, hidden, size, device=device) / size**0.5
    return ExpertWeights.plain(gate_up.to(dtype), down.to(dtype))


def fp8_weights(sizes: Sizes, device: torch.device) -> ExpertWeights:
    """With scales that differ from block to block."""

    def made(seed: int, rows: int, columns: int, halves: int) -> BlockScaled:
        shape = (sizes.num_experts, halves * rows, columns)
        values = (normal(seed, *shape, device=device) * 40).to(torch.float8_e4m3fn)
        blocks = (shape[0], halves * -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        scales = normal(seed + 1, *blocks, device=device).mul(0.3).exp() / 40 / columns**0.5
        return BlockScaled(values, scales)

    return ExpertWeights(
        made(1, sizes.intermediate, sizes.hidden, 2), made(3, sizes.hidden, sizes.intermediate, 1)
    )


def standard_rows(
    sizes: Sizes, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Dispatched:
    """Each with different choices; every seventh choice is of another rank."""
    hidden = normal(5, num_rows, sizes.hidden, device=device).to(dtype)
    scores = normal(6, num_rows, sizes.num_experts, device=device)
    ids = scores.topk(sizes.top_k, dim=1).indices
    ids.flatten()[6::7] = -1
    weights = normal(7, num_rows, sizes.top_k, device=device).abs()
    return Dispatched(hidden, ids, weights, None, None)


def batched_rows(
    sizes: Sizes, capacity: int, dtype: torch.dtype, device: torch.device
) -> Dispatched:
    """Counts from none to the capacity; garbage beyond."""
    counts = torch.arange(sizes.num_experts, dtype=torch.int32, device=device) * 7 % (capacity + 1)
    hidden = normal(8, sizes.num_experts, capacity, sizes.hidden, device=device)
    beyond = torch.arange(capacity, device=device) >= counts[:, None]
    hidden.masked_fill_(beyond[..., None], torch.nan)
    return Dispatched(hidden.to(dtype), None, None, counts, None)


def _check_plain(setup: Setup, report: Report, sizes: Sizes) -> None:
    from moed.moe.experts.torch_grouped import TorchGroupedExperts
    from moed.moe.experts.triton_batched import TritonBatchedExperts
    from moed.moe.experts.triton_standard import TritonExperts

    device = setup.torch_device
    dtypes = (torch.float32,) if setup.tiny else (torch.bfloat16, torch.float16)
    for dtype in dtypes:
        weights, limit = plain_weights(sizes, dtype, device), TOLERANCES[dtype]
        gate_up, down = weights.gate_up.values, weights.down.values
        what = f"D={sizes.hidden} I={sizes.intermediate} e={sizes.num_experts} {dtype}"
        for num_rows in TINY_ROWS if setup.tiny else LARGE_ROWS:
            rows = standard_rows(sizes, num_rows, dtype, device)
            expected = expected_standard(rows, gate_up, down)
            made: list[Experts] = [TritonExperts(weights), TorchGroupedExperts(weights)]
            for experts in made:
                name = f"{type(experts).__name__} T={num_rows} {what}"
                with report.attempt(name):
                    report.check(name, relative(experts(rows, True), expected), limit)
        blocks = batched_rows(sizes, 6 if setup.tiny else 96, dtype, device)
        name = f"TritonBatchedExperts {what}"
        with report.attempt(name):
            found = TritonBatchedExperts(weights)(blocks, False)
            error = batched_error(found, blocks, gate_up, down)
            report.check(name, error, limit)


def _check_fp8(setup: Setup, report: Report, sizes: Sizes) -> None:
    from moed.moe.experts.triton_batched import TritonBatchedExperts
    from moed.moe.experts.triton_standard import TritonExperts

    device = setup.torch_device
    if setup.device == "cpu":
        # The interpreter rounds to FP8 wrongly.
        report.measure("FP8 experts", "need a GPU")
        return
    if torch.cuda.get_device_capability() < (8, 9):
        report.measure("FP8 experts", "this GPU has no FP8 products")
        return
    weights = fp8_weights(sizes, device)
    gate_up = dequantized(weights.gate_up, 2)
    down = dequantized(weights.down, 1)
    what = f"FP8 D={sizes.hidden} I={sizes.intermediate} e={sizes.num_experts}"
    rows = standard_rows(sizes, 300, torch.bfloat16, device)
    expected = expected_standard(rows, gate_up, down, rounds=True)
    error = relative(TritonExperts(weights)(rows, True), expected)
    report.check(f"TritonExperts {what}", error, FP8_TOLERANCE)
    blocks = batched_rows(sizes, 96, torch.bfloat16, device)
    found = TritonBatchedExperts(weights)(blocks, False)
    error = batched_error(found, blocks, gate_up, down, rounds=True)
    report.check(f"TritonBatchedExperts {what}", error, FP8_TOLERANCE)


def dequantized(weights: BlockScaled, halves: int) -> torch.Tensor:
    """float32; the scales of each half of the rows begin anew."""
    parts = []
    pairs = zip(weights.values.chunk(halves, 1), weights.scales.chunk(halves, 1), strict=True)
    for values, scales in pairs:
        wide = scales.repeat_interleave(SCALE_BLOCK, 1).repeat_interleave(SCALE_BLOCK, 2)
        parts.append(values.float() * wide[:, : values.shape[1], : values.shape[2]])
    return torch.cat(parts, dim=1)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """[n, K] as inputs of FP8 products are."""
    from moed.moe.kernels.quantize import reference_quantize

    quantized = reference_quantize(rows)
    wide = quantized.scales.repeat_interleave(SCALE_BLOCK, 1)[:, : rows.shape[1]]
    return quantized.values.float() * wide


def one_expert(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, rounds: bool
) -> torch.Tensor:
    """[n, D] float32."""
    rows = rounded(rows.float()) if rounds else rows.float()
    gate, up = (rows @ gate_up.float().T).chunk(2, dim=1)
    active = F.silu(gate) * up
    return (rounded(active) if rounds else active) @ down.float().T


def expected_standard(
    rows: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, rounds: bool = False
) -> torch.Tensor:
    """[T, D] float32, one expert after the other."""
    assert rows.expert_ids is not None and rows.expert_weights is not None
    output = torch.zeros(rows.hidden.shape, device=rows.hidden.device)
    for expert in range(len(down)):
        own, choices = torch.where(rows.expert_ids == expert)
        results = one_expert(rows.hidden[own], gate_up[expert], down[expert], rounds)
        output.index_add_(0, own, results * rows.expert_weights[own, choices, None])
    return output


def batched_error(
    found: torch.Tensor,
    blocks: Dispatched,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rounds: bool = False,
) -> float:
    """Of the rows in use."""
    assert blocks.num_rows_per_expert is not None
    pairs = []
    for expert, count in enumerate(blocks.num_rows_per_expert.tolist()):
        own = one_expert(blocks.hidden[expert, :count], gate_up[expert], down[expert], rounds)
        pairs.append((found[expert, :count], own))
    found_rows, expected_rows = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return relative(found_rows, expected_rows)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN fails any check."""
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-20))


def _check_waits(setup: Setup, report: Report) -> None:
    """Nothing in the experts waits for the GPU."""
    from moed.moe.experts.torch_grouped import TorchGroupedExperts
    from moed.moe.experts.triton_batched import TritonBatchedExperts
    from moed.moe.experts.triton_standard import TritonExperts

    sizes, device = Sizes(256, 128, 8, 2), setup.torch_device
    weights = plain_weights(sizes, torch.bfloat16, device)
    rows = standard_rows(sizes, 33, torch.bfloat16, device)
    blocks = batched_rows(sizes, 16, torch.bfloat16, device)
    made: list[tuple[Experts, Dispatched]] = [
        (TritonExperts(weights), rows),
        (TorchGroupedExperts(weights), rows),
        (TritonBatchedExperts(weights), blocks),
    ]
    for experts, dispatched in made:
        experts(dispatched, False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(dispatched, False)
            failure = ""
        except RuntimeError as error:
            failure = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report.holds(f"{type(experts).__name__} waits for nothing", not failure, failure)
