"""How fast the experts are: TFLOP/s against the GPU's bf16 peak, and for few rows the weights read
per second. Figures, which pass or fail nothing.

Legend: T rows, D hidden, I intermediate size, e experts, K top-k.
"""

import dataclasses

import torch

from moed.dist.all2all.base import Dispatched
from moed.moe.experts import Experts, ExpertWeights, TorchExperts
from tests.gpu.kernels import Sizes, fp8_weights, plain_weights
from tests.gpu.report import Report
from tests.gpu.setup import Setup

# Dense, of the data sheets, in TFLOP/s; the first name that is found counts.
PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.5),
    ("H200", 989.5),
    ("GH200", 989.5),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("L40S", 362.0),
)
# DeepSeek-V3's with as many experts as a rank has of 8, and Qwen3-30B-A3B's.
LARGE = {
    "DeepSeek-like": Sizes(7168, 2048, 32, 8),
    "Qwen3-30B-like": Sizes(2048, 768, 128, 8),
}
TINY = {"tiny": Sizes(40, 24, 3, 2)}
LARGE_ROWS, TINY_ROWS = (16, 256, 4096), (4,)
PRODUCT, TINY_PRODUCT = 8192, 64
REPEATS = 10
BATCHED = "Triton batched"


def run(setup: Setup, report: Report) -> None:
    """Each implementation at each size."""
    peak = _peak(setup, report)
    device, dtype = setup.torch_device, setup.dtype
    for name, sizes in (TINY if setup.tiny else LARGE).items():
        experts = _implementations(setup, sizes, plain_weights(sizes, dtype, device))
        if setup.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
            from moed.moe.experts.triton_standard import TritonExperts

            experts["Triton FP8"] = TritonExperts(fp8_weights(sizes, device))
        for num_rows in TINY_ROWS if setup.tiny else LARGE_ROWS:
            for kind, implementation in experts.items():
                what = f"{name} T={num_rows} {kind}"
                with report.attempt(what):
                    load = _load(setup, sizes, num_rows, is_batched=kind == BATCHED)
                    _measure(setup, report, what, implementation, sizes, load, peak)


def _peak(setup: Setup, report: Report) -> float | None:
    """FLOP/s of the data sheet, or else of one large product."""
    size = TINY_PRODUCT if setup.tiny else PRODUCT
    left = torch.randn(size, size, device=setup.torch_device, dtype=setup.dtype)
    seconds = setup.median_s(lambda: left @ left, REPEATS)
    measured = 2 * size**3 / seconds
    report.measure(f"one product of {size} x {size}", measured / 1e12, "TFLOP/s")
    if setup.device == "cpu":
        return None
    name = torch.cuda.get_device_name()
    for known, tera in PEAKS:
        if known in name:
            report.measure(f"bf16 peak of {name}", tera, "TFLOP/s")
            return tera * 1e12
    report.measure(f"bf16 peak of {name}", "unknown: the product above stands for it")
    return measured


def _implementations(setup: Setup, sizes: Sizes, weights: ExpertWeights) -> dict[str, Experts]:
    from moed.moe.experts.torch_grouped import TorchGroupedExperts
    from moed.moe.experts.triton_batched import TritonBatchedExperts
    from moed.moe.experts.triton_standard import TritonExperts

    made: dict[str, Experts] = {
        "Triton": TritonExperts(weights),
        "torch grouped": TorchGroupedExperts(weights),
        BATCHED: TritonBatchedExperts(weights),
    }
    if setup.device == "cpu":
        made["torch"] = TorchExperts(weights)
    return made


def _measure(
    setup: Setup,
    report: Report,
    what: str,
    experts: Experts,
    sizes: Sizes,
    load: tuple[Dispatched, int],
    peak: float | None,
) -> None:
    rows, num_pairs = load
    # The batched format has no weights to apply.
    seconds = setup.median_s(lambda: experts(rows, rows.expert_weights is not None), REPEATS)
    rate = 6 * num_pairs * sizes.hidden * sizes.intermediate / seconds
    report.measure(what, seconds * 1e3, "ms")
    report.measure(what, rate / 1e12, "TFLOP/s")
    if peak is not None:
        report.measure(f"{what}, of the bf16 peak", 100 * rate / peak, "%")
    if num_pairs <= 16 * sizes.num_experts:
        # Few rows for each: reading weights is what takes the time.
        used = min(sizes.num_experts, num_pairs)
        num_bytes = 1 if what.endswith("FP8") else setup.dtype.itemsize
        read = 3 * used * sizes.hidden * sizes.intermediate * num_bytes / seconds
        report.measure(f"{what}, weights read", read / 1e9, "GB/s")


def _load(setup: Setup, sizes: Sizes, num_rows: int, is_batched: bool) -> tuple[Dispatched, int]:
    """Rows in the format, and their pairs of row and expert."""
    made = batched_load if is_batched else standard_load
    return made(setup, sizes, num_rows), num_rows * sizes.top_k


def standard_load(setup: Setup, sizes: Sizes, num_rows: int) -> Dispatched:
    """Choices dealt out evenly, so that as many experts as can be have rows."""
    device = setup.torch_device
    hidden = torch.randn(num_rows, sizes.hidden, device=device).to(setup.dtype)
    ids = torch.arange(num_rows * sizes.top_k, device=device) % sizes.num_experts
    weights = torch.rand(num_rows, sizes.top_k, device=device)
    return Dispatched(hidden, ids.view(num_rows, sizes.top_k), weights, None, None)


def batched_load(setup: Setup, sizes: Sizes, num_rows: int) -> Dispatched:
    """The same pairs in a buffer with four times the room."""
    standard = standard_load(setup, sizes, num_rows)
    assert standard.expert_ids is not None
    counts = torch.bincount(standard.expert_ids.flatten(), minlength=sizes.num_experts)
    capacity = 4 * int(counts.max())
    hidden = torch.randn(sizes.num_experts, capacity, sizes.hidden, device=setup.torch_device)
    return dataclasses.replace(
        standard,
        hidden=hidden.to(setup.dtype),
        expert_ids=None,
        expert_weights=None,
        num_rows_per_expert=counts.int(),
    )
