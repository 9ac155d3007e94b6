"""Which graphs are recorded, and what follows from the device for agreement and attention."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from moed.config import machine
from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.config.graphs import EAGER, GraphShape, graph_buckets, graph_shapes, smallest
from moed.config.resolve import resolve
from moed.config.settings import ServeSettings

Make = Callable[..., EngineConfig]


@pytest.fixture
def make(
    write_checkpoint: Any,
    capabilities: Mapping[str, BackendCapabilities],
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """On a machine that has a GPU; of the backends, `local` alone is safe in a graph."""
    monkeypatch.setattr(machine, "nvidia_device", lambda: "/dev/nvidia0")
    monkeypatch.setattr(machine, "_gpus", lambda: (8, 80 * 2**30))
    path = write_checkpoint()
    safe = dataclasses.replace(capabilities["local"], graph_safe=True)

    def resolved(**settings: Any) -> EngineConfig:
        given = ServeSettings(**{"model": str(path), **settings})
        return resolve(given, {**capabilities, "local": safe})

    return resolved


@pytest.mark.parametrize(
    ("max_num_rows", "buckets"),
    [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (100_000, (*(2**n for n in range(9)), 512))],
)
def test_buckets_double_up_to_the_most_rows(max_num_rows: int, buckets: tuple[int, ...]) -> None:
    assert graph_buckets(max_num_rows) == buckets


def test_widths_double_and_their_product_with_rows_is_bounded() -> None:
    # Blocks of 16: 1024 tokens are 64 blocks. 5000 tokens need 313. 2**18 rows are 16384 blocks.
    assert graph_shapes((1, 128), 5000, 16, copies_context=True) == (
        GraphShape(128, 128),
        GraphShape(128, 64),
        GraphShape(1, 313),
        GraphShape(1, 256),
        GraphShape(1, 128),
        GraphShape(1, 64),
    )
    # Where nothing is copied, one width serves all.
    assert graph_shapes((1, 128), 5000, 16, copies_context=False) == (
        GraphShape(128, 313),
        GraphShape(1, 313),
    )


def test_the_smallest_graph_that_holds_a_step() -> None:
    shapes = graph_shapes((1, 2, 4), 2048, 16, copies_context=True)
    assert smallest(shapes, GraphShape(3, 1)) == GraphShape(4, 64)
    assert smallest(shapes, GraphShape(2, 65)) == GraphShape(2, 128)
    assert smallest(shapes, GraphShape(5, 1)) == EAGER
    assert smallest(shapes, GraphShape(1, 129)) == EAGER
    assert smallest(shapes, EAGER) == EAGER


def test_decodes_are_recorded_on_gpus_alone(make: Make) -> None:
    assert make(max_num_seqs=5).runner.graph_buckets == (1, 2, 4, 5)
    # No bucket above B.
    assert make(max_num_batched_tokens=3).runner.graph_buckets == (1, 2, 3)
    assert make(enforce_eager=True).runner.graph_buckets == ()
    assert make(device="cpu").runner.graph_buckets == ()
    # A backend that waits for the device inside a layer.
    assert make(data_parallel_size=2).runner.graph_buckets == ()


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "nccl"),
        ({"device": "cpu"}, "gloo"),
        ({"agreement_backend": "gloo"}, "gloo"),
        ({"agreement_backend": "nccl"}, "nccl"),
    ],
)
def test_agreement_follows_the_device(make: Make, settings: dict[str, str], backend: str) -> None:
    assert make(**settings).parallel.agreement_backend == backend


@pytest.mark.parametrize(
    ("setting", "name"), [("agreement_backend", "nccl"), ("attention_backend", "flashinfer")]
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(make: Make, setting: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is '{name}'.*device is 'cpu'; take --"):
        make(device="cpu", **{setting: name})


def test_attention_is_chosen_at_the_start_on_gpus(make: Make) -> None:
    assert make().runner.attention_backend == "auto"
    assert make(attention_backend="flashinfer").runner.attention_backend == "flashinfer"
    assert make(device="cpu").runner.attention_backend == "torch"


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"agreement_backend": "gloo"}])
def test_ranks_must_share_it(make: Make, settings: dict[str, Any]) -> None:
    assert make(**settings).digest() != make().digest()
