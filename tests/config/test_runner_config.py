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
from tests.config.deep_ep_backends import LOW_LATENCY, backends

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

    def resolved(backend: BackendCapabilities = safe, **settings: Any) -> EngineConfig:
        given = ServeSettings(**{"model": str(path), **settings})
        return resolve(given, {**capabilities, "local": safe, backend.name: backend})

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


def test_steps_ahead_need_ranks_of_one_process(make: Make) -> None:
    assert not make().runner.step_ahead and make(step_ahead=True).runner.step_ahead
    with pytest.raises(ConfigError, match="step_ahead is on and tensor_parallel_size is 2"):
        make(step_ahead=True, tensor_parallel_size=2)


def test_nccl_is_refused_on_a_cpu(make: Make) -> None:
    with pytest.raises(ConfigError, match="agreement_backend is 'nccl'.*device is 'cpu'; take --"):
        make(device="cpu", agreement_backend="nccl")


HALF = {"head_dim": 64, "torch_dtype": "bfloat16"}
# What config.json says, and why FlashInfer cannot serve it.
UNKNOWN_ATTENTION = {
    "float32": ({"head_dim": 64}, "computes in bfloat16 or float16, and dtype is float32"),
    "head dim": ({**HALF, "head_dim": 32}, "head dims 64, 128, 256, and that of .* is 32"),
    "sinks": (
        {**HALF, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
        "has attention sinks",
    ),
    "latent": (
        {
            **HALF,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        "has latent attention",
    ),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Which of the optional packages there are."""

    def set_packages(*names: str) -> None:
        monkeypatch.setattr(machine, "installed_packages", lambda: frozenset(names))

    return set_packages


def test_attention_is_flashinfers_where_it_may_be(
    make: Make, write_checkpoint: Any, install: Callable[..., None]
) -> None:
    write_checkpoint(**HALF)
    install("flashinfer")
    # Whether it works shows at the start.
    assert make().runner.attention_backend == "auto"
    for name in ("flashinfer", "sdpa"):
        assert make(attention_backend=name).runner.attention_backend == name
    assert make(device="cpu").runner.attention_backend == "sdpa"
    install()
    assert make().runner.attention_backend == "sdpa"
    refusal = "'flashinfer' is unavailable: the package flashinfer is not installed; available are"
    with pytest.raises(ConfigError, match=f"attention_backend {refusal} auto, sdpa"):
        make(attention_backend="flashinfer")


@pytest.mark.parametrize(
    ("content", "reason"), UNKNOWN_ATTENTION.values(), ids=UNKNOWN_ATTENTION.keys()
)
def test_attention_that_flashinfer_does_not_know_is_torchs(
    make: Make,
    write_checkpoint: Any,
    install: Callable[..., None],
    content: dict[str, Any],
    reason: str,
) -> None:
    write_checkpoint(**content)
    install("flashinfer")
    assert make().runner.attention_backend == "sdpa"
    with pytest.raises(ConfigError, match=f"is unavailable: .*{reason}"):
        make(attention_backend="flashinfer")


def test_flashinfer_is_refused_on_a_cpu(make: Make, install: Callable[..., None]) -> None:
    install("flashinfer")
    with pytest.raises(ConfigError, match="needs a GPU, and device is 'cpu'; available are auto"):
        make(device="cpu", attention_backend="flashinfer")


def test_a_library_that_is_missing_is_told_before_any_process(
    make: Make, install: Callable[..., None]
) -> None:
    low_latency = backends()[LOW_LATENCY]
    install("flashinfer")
    with pytest.raises(ConfigError) as caught:
        make(data_parallel_size=2, all2all_backend=LOW_LATENCY, backend=low_latency)
    assert str(caught.value) == (
        "all2all_backend 'low_latency' is unavailable: the package deep_ep is not "
        "installed; take all2allv or allgather_reducescatter, which need torch alone"
    )
    # With it, what its limits say counts.
    install("deep_ep")
    with pytest.raises(ConfigError) as caught:
        make(data_parallel_size=2, all2all_backend=LOW_LATENCY, backend=low_latency)
    assert "unavailable" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"agreement_backend": "gloo"}])
def test_ranks_must_share_it(make: Make, settings: dict[str, Any]) -> None:
    assert make(**settings).digest() != make().digest()
