"""How busy experts are: reports of the processes, and what is made of them."""

import base64
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moed.server import expert_metrics
from moed.server.expert_loads import WINDOW_S, ExpertLoads, LayerLoad
from moed.server.expert_metrics import expert_families
from moed.server.expert_reports import REPORT_INTERVAL_S, ExpertReports
from moed.server.messages import ExpertLoad, RoutedExperts
from moed.server.routed_experts import RoutedRecord
from tests.server.engine.configs import engine_config

_CONFIG = engine_config(ranks=2)
CONFIG = replace(_CONFIG, model=replace(_CONFIG.model, num_experts=8))


class Counts:
    """A model's counters."""

    moe_layers = (1, 3)

    def __init__(self) -> None:
        self.moe_rows = torch.zeros(2, 4, dtype=torch.int64)


def test_reports_come_once_a_second_and_only_when_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sent: list[ExpertLoad] = []
    model = Counts()
    reports = ExpertReports(5, model, sent.append)
    for _ in range(10):
        model.moe_rows[1, 2] += 1
        reports.after_step()
    assert not sent
    now[0] += REPORT_INTERVAL_S
    reports.after_step()
    model.moe_rows = model.moe_rows.clone()
    reports.after_step()
    assert sent == [ExpertLoad(5, [1, 3], [[0, 0, 0, 0], [0, 0, 10, 0]])]
    reports.before_sleep()
    assert len(sent) == 1
    model.moe_rows[0, 0] += 1
    reports.before_sleep()
    assert sent[1:] == [ExpertLoad(5, [1, 3], [[1, 0, 0, 0], [0, 0, 10, 0]])]


def test_a_layer_over_two_ranks() -> None:
    """Experts 0..3 on rank 0, 4..7 on rank 1."""
    now = [0.0]
    loads = ExpertLoads(CONFIG, lambda: now[0])
    assert loads.layers() == [] and loads.rank_rows() == [0, 0]
    loads.add(ExpertLoad(0, [2], [[6, 0, 0, 0]]))
    loads.add(ExpertLoad(1, [2], [[1, 1, 0, 0]]))
    (layer,) = loads.layers()
    assert layer.layer == 2 and layer.rows == layer.window_rows == [6, 0, 0, 0, 1, 1, 0, 0]
    assert layer.window_rank_rows == [6, 2] and loads.rank_rows() == [6, 2]
    # The busiest rank has 6, the mean is 4; one expert of eight has 6 rows.
    assert layer.imbalance == 1.5 and layer.balancedness == pytest.approx(2 / 3)
    # Shares 3/4, 1/8, 1/8 of eight experts: (3/4 log2(4/3) + 2 * 3/8) / 3.
    assert layer.entropy == pytest.approx((0.75 * math.log2(4 / 3) + 0.75) / 3)
    assert (layer.hot_share(1), layer.hot_share(4), layer.num_dead) == (0.75, 1.0, 5)


@pytest.mark.parametrize(
    ("rows", "entropy"),
    [([0] * 4, 1.0), ([9, 0, 0, 0], 0.0), ([5, 5, 5, 5], 1.0), ([3, 3, 0, 0], 0.5)],
)
def test_entropy_of_a_layer(rows: list[int], entropy: float) -> None:
    load = LayerLoad(0, rows, rows, [sum(rows)])
    assert load.entropy == pytest.approx(entropy)


def test_the_window_forgets_and_the_totals_do_not() -> None:
    now = [0.0]
    loads = ExpertLoads(CONFIG, lambda: now[0])
    loads.add(ExpertLoad(0, [0], [[6, 0, 0, 0]]))
    # Two marks later than the window, with nothing new between.
    for _ in range(9):
        now[0] += WINDOW_S / 4
        loads.layers()
    loads.add(ExpertLoad(0, [0], [[6, 0, 2, 0]]))
    (layer,) = loads.layers()
    assert layer.rows[:4] == [6, 0, 2, 0]
    assert layer.window_rows[:4] == [0, 0, 2, 0]
    assert WINDOW_S <= loads.window_s <= 1.5 * WINDOW_S


def test_series_per_expert_stop_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = ExpertLoads(CONFIG)
    loads.add(ExpertLoad(0, [0], [[6, 0, 0, 0]]))
    found = {family.name: family for family in expert_families(loads, "tiny")}
    samples = found["moed:expert_tokens"].samples
    assert [sample.value for sample in samples] == [6, 0, 0, 0, 0, 0, 0, 0]
    monkeypatch.setattr(expert_metrics, "MAX_EXPERT_SERIES", 7)
    found = {family.name: family for family in expert_families(loads, "tiny")}
    assert "moed:expert_tokens" not in found and "moed:expert_load_imbalance" in found


def test_routed_experts_are_put_together_by_position() -> None:
    """Two layers, top-2; positions 1 and 2 come again after preemption."""

    def part(first: int, values: list[int]) -> RoutedExperts:
        ids = np.array([[[v, v + 1], [v + 2, v + 3]] for v in values], dtype="<u2")
        return RoutedExperts(first, len(values), ids.tobytes())

    record = RoutedRecord(2)
    record.add(part(0, [10, 20]))
    record.add(part(0, [10, 20, 30]))
    record.add(part(3, [40]))
    found = np.load(io.BytesIO(base64.b64decode(record.encoded(3))), allow_pickle=False)
    assert found.shape == (3, 2, 2) and found.dtype == np.uint16
    assert found[:, 1, 1].tolist() == [13, 23, 33]
