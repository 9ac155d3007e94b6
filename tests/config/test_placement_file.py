"""`--expert-placement FILE`."""

import json
from pathlib import Path
from typing import Any

import pytest

from moed.config.errors import ConfigError
from moed.config.placement_file import read_placement
from moed.config.resolve import resolve
from moed.config.settings import ServeSettings
from moed.dist.registry import capabilities
from tests.server.engine.configs import engine_config

MODEL = engine_config().model
EVEN = [list(range(0, MODEL.num_experts, 2)), list(range(1, MODEL.num_experts, 2))]


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "placement.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_layers_that_are_not_named(tmp_path: Path) -> None:
    last = MODEL.num_layers - 1
    path = written(tmp_path, {"layers": {str(last): EVEN}})
    table = read_placement(path, MODEL, 2)
    half = -(-MODEL.num_experts // 2)
    assert table[last] == tuple(map(tuple, EVEN))
    assert table[0][0] == tuple(range(half))
    path = written(tmp_path, {"all_layers": EVEN})
    assert read_placement(path, MODEL, 2) == (tuple(map(tuple, EVEN)),) * MODEL.num_layers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the expert placement"),
        ([], "not an object with 'layers' or 'all_layers'"),
        ({"layer": {}}, "not an object with 'layers'"),
        ({"layers": {}, "lairs": 1}, "has the key 'lairs'; known are layers"),
        ({"layers": []}, "'layers' is not an object"),
        ({"layers": {"77": EVEN}}, "places experts of layer 77, and .* has the layers 0 to"),
        ({"all_layers": 5}, "all_layers: it must be a list of expert ids for each rank"),
        ({"layers": {"0": [[0, True]]}}, "layer 0: it must be a list of expert ids"),
        ({"layers": {"0": [[0]]}}, "layer 0: it places experts on 1 ranks, and there are 2"),
        ({"layers": {"0": [[0], [1]]}}, "layer 0: no rank holds expert 2"),
        ({"layers": {"0": [[0, 0], [1]]}}, "layer 0: rank 0 holds an expert twice"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_placement(written(tmp_path, content), MODEL, 2)


def test_copies_count_in_every_size(tmp_path: Path) -> None:
    """All layers have the slots of the fullest rank; buffers, weights and the plan follow."""
    linear = resolve(ServeSettings(data_parallel_size=2, device="cpu"), capabilities())
    num_experts = linear.model.num_experts
    most = [list(range(num_experts)), list(range(num_experts // 2, num_experts))]
    path = written(tmp_path, {"layers": {"0": most}})
    settings = ServeSettings(data_parallel_size=2, device="cpu", expert_placement=path)
    config = resolve(settings, capabilities())
    assert linear.fused_moe.num_local_slots == num_experts // 2
    assert config.fused_moe.num_local_slots == num_experts
    for layer in range(config.model.num_layers):
        assert config.placement(layer).num_local_slots == num_experts
    # Ranks with another file would route rows to where the experts are not.
    assert config.digest() != linear.digest()


def test_sharded_experts_have_no_place(tmp_path: Path) -> None:
    path = written(tmp_path, {"all_layers": EVEN})
    settings = ServeSettings(
        data_parallel_size=2, device="cpu", expert_placement=path, enable_expert_parallel=False
    )
    with pytest.raises(ConfigError, match="enable_expert_parallel is off.*leave out one"):
        resolve(settings, capabilities())
