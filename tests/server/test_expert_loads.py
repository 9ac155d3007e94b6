"""How busy experts are: reports of the processes, and what is made of them."""

import base64
import io
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from moed.dist.all2all.traffic import Traffic
from moed.server import expert_metrics
from moed.server.expert_loads import WINDOW_S, ExpertLoads, LayerLoad
from moed.server.expert_metrics import expert_families, wire_family
from moed.server.expert_reports import REPORT_INTERVAL_S, ExpertReports
from moed.server.messages import ExpertLoad, RoutedExperts, WireBytes
from moed.server.routed_experts import RoutedRecord
from moed.server.wire_totals import WireTotals
from tests.server.engine.configs import engine_config
from tests.server.engine.loads import expert_load

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
    # Of eight processes, on two nodes.
    traffic = Traffic(torch.zeros(8, dtype=torch.int64), 10, 4)
    reports = ExpertReports(5, model, traffic, range(4, 8), sent.append)
    for _ in range(10):
        reports.before_step("decode", 3)
        model.moe_rows[1, 2] += 1
        reports.after_step()
    assert not sent
    now[0] += REPORT_INTERVAL_S
    reports.after_step()
    model.moe_rows = model.moe_rows.clone()
    reports.after_step()
    counted = partial(expert_load, 5, [1, 3], num_steps=10, num_tokens=30)
    assert sent == [counted([[0, 0, 0, 0], [0, 0, 10, 0]])]
    reports.before_sleep()
    assert len(sent) == 1
    model.moe_rows[0, 0] += 1
    reports.before_sleep()
    assert sent[1:] == [counted([[1, 0, 0, 0], [0, 0, 10, 0]])]


def test_what_is_counted_belongs_to_the_phase_of_its_step() -> None:
    """Process 1 of four, two on each node; what the warm-up counted is left out."""
    sent: list[ExpertLoad] = []
    model, traffic = Counts(), Traffic(torch.tensor([7, 7, 7, 7]), 10, 4)
    model.moe_rows += 100
    reports = ExpertReports(1, model, traffic, range(0, 2), sent.append)
    for phase in ("prefill", "prefill", "decode", "prefill", "decode", "decode"):
        reports.before_step(phase, 0)
        model.moe_rows[0, 3] += 5 if phase == "prefill" else 1
        # To itself, to its neighbour, and to the two of the other node.
        traffic.rows_sent.add_(torch.tensor([2, 50, 1, 3]) if phase == "prefill" else 1)
        reports.after_step()
    reports.before_sleep()
    (load,) = sent
    assert load.rows == {
        "prefill": [[0, 0, 0, 15], [0, 0, 0, 0]],
        "decode": [[0, 0, 0, 3], [0, 0, 0, 0]],
    }
    # Three steps each: 2 and 4 rows in a prefill, 1 and 2 in a decode; 10 bytes out, 4 back.
    assert load.wire_bytes == {
        "prefill": {"intra": WireBytes(60, 24), "inter": WireBytes(120, 48)},
        "decode": {"intra": WireBytes(30, 12), "inter": WireBytes(60, 24)},
    }


def test_a_layer_over_two_ranks() -> None:
    """Experts 0..3 on rank 0, 4..7 on rank 1."""
    now = [0.0]
    loads = ExpertLoads(CONFIG, lambda: now[0])
    assert loads.layers() == []
    assert loads.rank_rows() == {"prefill": [0, 0], "decode": [0, 0]}
    loads.add(expert_load(0, [2], [[6, 0, 0, 0]]))
    loads.add(expert_load(1, [2], [[1, 0, 0, 0]], prefill=[[0, 1, 0, 0]]))
    (layer,) = loads.layers()
    assert layer.layer == 2 and layer.rows == layer.window_rows == [6, 0, 0, 0, 1, 1, 0, 0]
    assert layer.window_rank_rows == [6, 2]
    assert loads.rank_rows() == {"prefill": [0, 1], "decode": [6, 1]}
    # The busiest rank has 6, the mean is 4; one expert of eight has 6 rows.
    assert layer.imbalance == 1.5
    # In decode the mean is 3.5; in prefill one of the two has everything.
    assert layer.balancedness("decode") == pytest.approx(3.5 / 6)
    assert layer.balancedness("prefill") == 0.5
    # Shares 3/4, 1/8, 1/8 of eight experts: (3/4 log2(4/3) + 2 * 3/8) / 3.
    assert layer.entropy == pytest.approx((0.75 * math.log2(4 / 3) + 0.75) / 3)
    assert (layer.hot_share(1), layer.hot_share(4), layer.num_dead) == (0.75, 1.0, 5)


@pytest.mark.parametrize(
    ("rows", "entropy"),
    [([0] * 4, 1.0), ([9, 0, 0, 0], 0.0), ([5, 5, 5, 5], 1.0), ([3, 3, 0, 0], 0.5)],
)
def test_entropy_of_a_layer(rows: list[int], entropy: float) -> None:
    load = LayerLoad(0, rows, rows, {"decode": [sum(rows)]})
    assert load.entropy == pytest.approx(entropy)


def test_the_window_forgets_and_the_totals_do_not() -> None:
    now = [0.0]
    loads = ExpertLoads(CONFIG, lambda: now[0])
    loads.add(expert_load(0, [0], [[6, 0, 0, 0]]))
    # Two marks later than the window, with nothing new between.
    for _ in range(9):
        now[0] += WINDOW_S / 4
        loads.layers()
    loads.add(expert_load(0, [0], [[6, 0, 2, 0]]))
    (layer,) = loads.layers()
    assert layer.rows[:4] == [6, 0, 2, 0]
    assert layer.window_rows[:4] == [0, 0, 2, 0]
    assert WINDOW_S <= loads.window_s <= 1.5 * WINDOW_S


def test_pairs_that_no_expert_computed_are_seen_when_all_tell_of_the_same_steps() -> None:
    """Top-2, one layer: four tokens are eight pairs."""
    loads = ExpertLoads(replace(CONFIG, model=replace(CONFIG.model, top_k=2)))
    assert sum(s.value for s in dropped(loads)) == 0
    loads.add(expert_load(0, [0], [[2, 0, 0, 0]], num_steps=7, num_tokens=4))
    assert loads.num_dropped == 0  # rank 1 may have computed the rest
    loads.add(expert_load(1, [0], [[0, 0, 0, 0]], num_steps=6, num_tokens=0))
    assert loads.num_dropped == 0  # and tell of it later
    loads.add(expert_load(1, [0], [[0, 5, 0, 0]], num_steps=7, num_tokens=0))
    assert loads.num_dropped == 1
    loads.start_anew()
    loads.add(expert_load(0, [0], [[1, 0, 0, 0]], num_steps=1, num_tokens=1))
    loads.add(expert_load(1, [0], [[1, 0, 0, 0]], num_steps=1, num_tokens=0))
    assert loads.num_dropped == 1
    loads.add(expert_load(0, [0], [[1, 0, 0, 0]], num_steps=2, num_tokens=1))
    loads.add(expert_load(1, [0], [[1, 0, 0, 0]], num_steps=2, num_tokens=2))
    assert [(s.labels["reason"], s.value) for s in dropped(loads)] == [("not_computed", 5)]


def dropped(loads: ExpertLoads) -> list[Any]:
    families = {family.name: family for family in expert_families(loads, "m")}
    return families["moed:dropped_tokens"].samples


def test_series_per_expert_stop_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = ExpertLoads(CONFIG)
    loads.add(expert_load(0, [0], [[6, 0, 0, 0]]))
    found = {family.name: family for family in expert_families(loads, "tiny")}
    samples = found["moed:expert_tokens"].samples
    assert [sample.value for sample in samples] == [6, 0, 0, 0, 0, 0, 0, 0]
    monkeypatch.setattr(expert_metrics, "MAX_EXPERT_SERIES", 7)
    found = {family.name: family for family in expert_families(loads, "tiny")}
    assert "moed:expert_tokens" not in found and "moed:expert_load_imbalance" in found


def test_bytes_of_all_processes_are_summed_and_outlive_a_group() -> None:
    totals = WireTotals(2)
    totals.add(expert_load(0, [0], [[1]], num_bytes=10))
    totals.add(expert_load(0, [0], [[2]], num_bytes=30))
    totals.add(expert_load(1, [0], [[2]], num_bytes=100))
    totals.start_anew()
    totals.add(expert_load(1, [0], [[1]], num_bytes=1000))
    found = {tuple(s.labels.values())[1:]: s.value for s in wire_family(totals, "m").samples}
    assert len(found) == 2 * 2 * 2
    assert found.pop(("dispatch", "intra", "decode")) == 1130
    assert found.pop(("combine", "intra", "decode")) == 565
    assert set(found.values()) == {0}


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
