"""Each native kernel against its torch twin: float32 within 1e-5, bfloat16 within its own rounding.

All files that were built and that this processor can run are held, not the best one alone.
"""

import importlib.machinery
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moed.config.errors import ConfigError
from moed.dist.all2all.base import Dispatched
from moed.moe import native
from moed.moe.experts import ExpertWeights, reference_experts
from moed.moe.experts.native import NativeExperts, obstacle
from moed.moe.linear import Linear
from moed.moe.native import binding
from moed.moe.native.matrix import NativeMatrix
from moed.moe.native.packing import can_pack, pack
from moed.moe.norm import rms_norm
from moed.moe.router import NativeRouter, RouterSpec, route

OFFERED = torch.cpu.get_capabilities()
BUILT = [
    (name, label)
    for name, label, wanted in binding.INSTRUCTION_SETS
    if all(OFFERED.get(feature) for feature in wanted) and binding.built_file(name) is not None
]
NUM_ROWS = [0, 1, 2, 5, 7, 33, 200]
DTYPES = [torch.float32, torch.bfloat16]
# bfloat16 keeps 8 bits: half of the last one is 2^-9 of a number, and sums are of rounded inputs.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=BUILT, ids=lambda built: built[0])
def library(request: pytest.FixtureRequest) -> binding.Library:
    name, label = request.param
    path = binding.built_file(name)
    assert path is not None
    return binding.Library(path, label)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """More than cores, so that barriers are held up too."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_something_is_held_where_there_is_a_compiler() -> None:
    """Otherwise every test here would pass by not running."""
    is_native = native.library() is not None
    assert is_native == bool(BUILT)


def test_packing_by_hand(library: binding.Library) -> None:
    """Two outputs of three inputs: a group is filled up with zeros, its outputs side by side."""
    packed = pack(library, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert packed.flatten().view(3, 16)[:, :3].tolist() == [[1, 4, 0], [2, 5, 0], [3, 6, 0]]
    few = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.bfloat16)
    pairs = pack(library, few)
    assert pairs.flatten().view(2, 16, 2)[:, :2].tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert not can_pack(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(2, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 50), (16, 32), (48, 70)])
def test_packing_takes_parts_of_others(
    library: binding.Library, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    """Every other row, some columns from an odd one on, or the columns of a transposed one."""
    whole = normal(2 * outputs, inputs + 9).to(dtype)
    width = 2 if dtype == torch.bfloat16 else 1
    for part in (whole[::2, 3 : 3 + inputs], normal(inputs, outputs).to(dtype).T):
        rows = torch.zeros(-(-outputs // 16) * 16, inputs, dtype=dtype)
        rows[:outputs] = part
        wanted = rows.view(-1, 16, inputs // width, width).transpose(1, 2)
        assert torch.equal(pack(library, part), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (37, 50), (64, 32), (200, 130)])
def test_a_product(library: binding.Library, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = (normal(outputs, inputs) / inputs**0.5).to(dtype)
    bias = normal(outputs, seed=1).to(dtype)
    product = NativeMatrix(library, weight, bias)
    for num_rows in NUM_ROWS:
        rows = normal(num_rows, inputs, seed=2).to(dtype)
        found = product(rows)
        wanted = rows.double() @ weight.double().T + bias.double()
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


def test_a_row_does_not_depend_on_the_others(library: binding.Library) -> None:
    """Bit for bit, whatever the number of rows."""
    for dtype in DTYPES:
        product = NativeMatrix(library, normal(40, 64).to(dtype), None)
        rows = normal(101, 64, seed=1).to(dtype)
        together = product(rows)
        for row in (0, 5, 95, 100):
            assert torch.equal(product(rows[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_numbers_travel(library: binding.Library, dtype: torch.dtype) -> None:
    """NaN and infinity in one row stay in it, and stay what they are."""
    product = NativeMatrix(library, torch.ones(20, 4, dtype=dtype), None)
    rows = torch.ones(3, 4, dtype=dtype)
    rows[0, 0], rows[1, 1] = torch.nan, torch.inf
    found = product(rows)
    assert found[0].isnan().all() and (found[1] == torch.inf).all() and (found[2] == 4).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 50, 256])
def test_a_norm(
    library: binding.Library,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    size: int,
) -> None:
    weight = normal(size, seed=1).to(dtype)
    monkeypatch.setattr(native, "library", lambda: library)
    for num_rows in NUM_ROWS:
        rows = normal(num_rows, size).to(dtype) * 3
        found = rms_norm(rows, weight, 1e-6)
        wide = rows.double()
        wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        torch.testing.assert_close(found.double(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [RouterSpec(3, True), RouterSpec(2, False, scale=2.5), RouterSpec(20, True)], ids=str
)
def test_a_router(library: binding.Library, dtype: torch.dtype, spec: RouterSpec) -> None:
    weight, bias = normal(20, 32).to(dtype), normal(20, seed=1).to(dtype)
    weight[7], bias[7] = weight[4], bias[4]  # equals: the one with the lower id comes first
    router = NativeRouter(library, weight, bias, spec)
    for num_rows in NUM_ROWS:
        rows = normal(num_rows, 32, seed=2).to(dtype)
        weights, ids = router.route(rows)
        # Of the same logits, so that no rounding makes another choice.
        logits = NativeMatrix(library, weight, bias)(rows)
        wanted_weights, wanted_ids = route(logits, spec)
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)


def test_a_router_gives_valid_experts_for_any_numbers(library: binding.Library) -> None:
    router = NativeRouter(library, normal(20, 4), None, RouterSpec(3, True))
    _, ids = router.route(torch.tensor([[torch.nan] * 4, [torch.inf, 0, 0, 0], [1e38] * 4]))
    for chosen in ids.tolist():
        assert len(set(chosen)) == 3 and set(chosen) <= set(range(20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apply_weights", [True, False])
@pytest.mark.parametrize("sizes", [(5, 16, 24), (3, 50, 18), (6, 144, 64)], ids=str)
def test_experts(
    library: binding.Library, dtype: torch.dtype, apply_weights: bool, sizes: tuple[int, int, int]
) -> None:
    """A third of the choices lives elsewhere, and one expert gets nothing."""
    num_experts, hidden, size = sizes
    weights = ExpertWeights.plain(
        (normal(num_experts, 2 * size, hidden) / hidden**0.5).to(dtype),
        (normal(num_experts, hidden, size, seed=1) / size**0.5).to(dtype),
    )
    experts = NativeExperts.of(library, weights)
    counts = torch.zeros(num_experts, dtype=torch.int64)
    for num_rows in [0, 1, 2, 7, 33]:
        ids = normal(num_rows, num_experts - 1, seed=2).argsort(dim=-1)[:, :2]
        ids[normal(num_rows, 2, seed=3) > 0.4] = -1
        hiddens, factors = normal(num_rows, hidden, seed=4).to(dtype), normal(num_rows, 2, seed=5)
        rows = Dispatched(hiddens, ids, factors, None, None)
        found = experts(rows, apply_weights)
        assert found.dtype == dtype and found.shape == (num_rows, hidden)
        wanted = reference_experts(rows, weights.gate_up.values, weights.down.values, apply_weights)
        torch.testing.assert_close(found.float(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
        counts += torch.bincount(ids[ids >= 0], minlength=num_experts)
    assert experts.rows_per_slot.tolist() == counts.tolist()


def test_many_rows_of_one_expert(library: binding.Library) -> None:
    """More than one task takes at once."""
    weights = ExpertWeights.plain(normal(2, 32, 16) / 4, normal(2, 16, 16) / 4)
    ids = torch.tensor([[1]]).expand(250, 1)
    rows = Dispatched(normal(250, 16), ids, torch.ones(250, 1), None, None)
    found = NativeExperts.of(library, weights)(rows, True)
    wanted = reference_experts(rows, weights.gate_up.values, weights.down.values, True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_experts_here(library: binding.Library) -> None:
    """All rows are other ranks': zeros."""
    weights = ExpertWeights.plain(normal(2, 32, 16), normal(2, 16, 16))
    ids = torch.full((3, 2), -1)
    found = NativeExperts.of(library, weights)(
        Dispatched(normal(3, 16), ids, torch.ones(3, 2), None, None), True
    )
    assert torch.equal(found, torch.zeros(3, 16))


def test_what_the_kernels_do_not_know_is_left_to_torch() -> None:
    assert obstacle(ExpertWeights.plain(normal(2, 6, 4), normal(2, 4, 3))) is None
    sixteen = ExpertWeights.plain(normal(2, 8, 4).half(), normal(2, 4, 4).half())
    assert "float32, or bfloat16" in str(obstacle(sixteen))
    odd = ExpertWeights.plain(normal(2, 6, 4).bfloat16(), normal(2, 4, 3).bfloat16())
    assert "even sizes" in str(obstacle(odd))


def test_torch_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_choice", "auto")
    native.use_kernels("torch")
    assert native.library() is None and native.describe() == "torch"
    assert Linear(normal(4, 4), None).native is None


def test_without_a_compiler_torch_computes_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binding, "_choice", "auto")
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    binding.found_library.cache_clear()
    try:
        if any(OFFERED.get(name) for name in ("avx2", "avx512_f")):
            assert native.describe().startswith("torch: the native kernels were not built")
        assert native.library() is None
        with pytest.raises(ConfigError, match="cpu_kernels is 'native', and .*take 'auto'"):
            native.use_kernels("native")
    finally:
        binding.found_library.cache_clear()


def test_a_broken_file_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not BUILT:
        pytest.skip("no native kernels here")
    end = importlib.machinery.EXTENSION_SUFFIXES[0]
    for name, *_ in binding.INSTRUCTION_SETS:
        (tmp_path / f"{name}{end}").write_bytes(b"not a library")
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    binding.found_library.cache_clear()
    try:
        assert "cannot be loaded" in native.describe() and native.library() is None
    finally:
        binding.found_library.cache_clear()
