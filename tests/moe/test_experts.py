"""Experts equal an obvious reference, and cost what their rows cost."""

import subprocess
import sys

import pytest
import torch

from moed.config.capabilities import ActivationFormat
from moed.config.errors import ConfigError
from moed.dist.all2all.base import Dispatched
from moed.moe.experts import ExpertWeights, TorchExperts, make_experts, reference_experts
from moed.moe.linear import Linear

HIDDEN, SIZE = 16, 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights_of(num_experts: int, dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(num_experts)
    gate_up = torch.randn(num_experts, 2 * SIZE, HIDDEN, generator=generator) / 4
    down = torch.randn(num_experts, HIDDEN, SIZE, generator=generator) / 4
    return ExpertWeights.plain(gate_up.to(dtype), down.to(dtype))


def rows_of(ids: list[list[int]], top_k: int, dtype: torch.dtype = torch.float32) -> Dispatched:
    generator = torch.Generator().manual_seed(len(ids))
    return Dispatched(
        hidden=torch.randn(len(ids), HIDDEN, generator=generator).to(dtype),
        expert_ids=torch.tensor(ids, dtype=torch.int64).view(len(ids), top_k),
        expert_weights=torch.rand(len(ids), top_k, generator=generator),
        num_rows_per_expert=None,
        state=None,
    )


def random_ids(num_rows: int, num_experts: int, top_k: int) -> list[list[int]]:
    """Distinct experts per row; about a third of the choices live elsewhere."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=-1)[:, :top_k]
    ids[torch.rand(num_rows, top_k, generator=generator) < 0.33] = -1
    listed: list[list[int]] = ids.tolist()
    return listed


@pytest.mark.parametrize("apply_weights", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=str
)
def test_equals_the_reference(
    dtype: torch.dtype, tolerance: float, num_rows: int, apply_weights: bool
) -> None:
    weights = weights_of(5, dtype)
    dispatched = rows_of(random_ids(num_rows, 5, 3), 3, dtype)
    found = TorchExperts(weights)(dispatched, apply_weights)
    assert found.dtype == dtype and found.shape == (num_rows, HIDDEN)
    expected = reference_experts(
        dispatched, weights.gate_up.values, weights.down.values, apply_weights
    )
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_the_reference_by_hand() -> None:
    """x = 2, gate 1, up 3, down 5: 5 * silu(2) * 6 with silu(2) = 2 / (1 + e**-2) = 1.76159."""
    dispatched = Dispatched(
        hidden=torch.tensor([[2.0]]),
        expert_ids=torch.tensor([[0, -1]]),
        expert_weights=torch.tensor([[0.5, 100.0]]),
        num_rows_per_expert=None,
        state=None,
    )
    gate_up, down = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[5.0]]])
    for experts in (
        reference_experts,
        lambda d, g, o, w: TorchExperts(ExpertWeights.plain(g, o))(d, w),
    ):
        weighted = experts(dispatched, gate_up, down, True)
        torch.testing.assert_close(weighted, torch.tensor([[26.42391]]))
        torch.testing.assert_close(
            experts(dispatched, gate_up, down, False), torch.tensor([[52.84782]])
        )


def test_rows_of_other_ranks_give_zero() -> None:
    experts = TorchExperts(weights_of(4, torch.float32))
    output = experts(rows_of([[-1, -1], [0, -1]], 2), True)
    assert torch.equal(output[0], torch.zeros(HIDDEN))
    assert output[1].abs().sum() > 0
    assert int(experts.rows_per_slot.sum()) == 1


@pytest.mark.parametrize(("num_experts", "ids"), [(4, []), (0, []), (0, [[-1, -1], [-1, -1]])])
def test_no_rows_and_no_experts(num_experts: int, ids: list[list[int]]) -> None:
    experts = TorchExperts(weights_of(num_experts, torch.float32))
    output = experts(rows_of(ids, 2), True)
    assert torch.equal(output, torch.zeros(len(ids), HIDDEN))
    assert int(experts.rows_per_slot.sum()) == 0


@pytest.mark.parametrize(
    ("ids", "num_products"),
    [
        ([], 0),
        ([[-1, -1]], 0),
        ([[6, 2]], 2 * 2),
        ([[6, 2], [2, 6], [6, -1]], 2 * 2),
        ([[7, 0], [1, 2]], 4 * 2),
    ],
)
def test_empty_experts_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, ids: list[list[int]], num_products: int
) -> None:
    """Two matrix products per expert that has rows, each over those rows alone."""
    rows: list[int] = []

    real = Linear.__call__

    def counted(linear: Linear, inputs: torch.Tensor) -> torch.Tensor:
        rows.append(inputs.shape[0])
        return real(linear, inputs)

    monkeypatch.setattr(Linear, "__call__", counted)
    experts = TorchExperts(weights_of(8, torch.float32))
    experts(rows_of(ids, 2), True)
    assert len(rows) == num_products
    num_pairs = sum(expert >= 0 for choices in ids for expert in choices)
    assert sum(rows) == 2 * num_pairs
    assert experts.rows_per_slot.tolist() == [
        sum(choices.count(expert) for choices in ids) for expert in range(8)
    ]


def test_a_row_does_not_depend_on_the_others() -> None:
    experts = TorchExperts(weights_of(6, torch.float32))
    together = rows_of(random_ids(40, 6, 2), 2)
    assert together.expert_ids is not None and together.expert_weights is not None
    found = experts(together, True)
    for row in (0, 17, 39):
        alone = Dispatched(
            together.hidden[row : row + 1],
            together.expert_ids[row : row + 1],
            together.expert_weights[row : row + 1],
            None,
            None,
        )
        torch.testing.assert_close(experts(alone, True)[0], found[row], rtol=0, atol=1e-6)


def test_garbage_in_the_rows_is_contained() -> None:
    """NaN in one row leaves the others clean."""
    weights = weights_of(3, torch.float32)
    dispatched = rows_of([[0, 1], [0, 1], [2, 0]], 2)
    dispatched.hidden[1] = torch.nan
    output = TorchExperts(weights)(dispatched, True)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()


def test_a_format_without_experts_is_refused() -> None:
    weights = weights_of(2, torch.float32)
    make_experts(ActivationFormat.STANDARD, "cpu", weights)
    with pytest.raises(ConfigError, match="batched format.* on abacus.*--all2all-backend"):
        make_experts(ActivationFormat.BATCHED, "abacus", weights)


def test_a_kernel_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="batched format.* on cuda: .*triton is not installed"):
        make_experts(ActivationFormat.BATCHED, "cuda", weights_of(2, torch.float32))
    # The standard format needs no kernel of ours.
    make_experts(ActivationFormat.STANDARD, "cuda", weights_of(2, torch.float32))


def test_a_machine_without_triton_is_enough() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, moed.moe.model;"
        "from moed.config.capabilities import ActivationFormat as Format;"
        "from moed.moe.experts import ExpertWeights, make_experts;"
        "weights = ExpertWeights.plain(torch.ones(1, 2, 1), torch.ones(1, 1, 1));"
        "[make_experts(format, 'cpu', weights) for format in Format]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
