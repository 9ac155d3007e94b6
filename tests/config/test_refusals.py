"""Each refusal names what was asked, what is allowed, and a choice that is then not refused.

Legend: R ranks, N tokens per rank, B max_num_batched_tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from moed.config.deep_ep_question import question
from moed.config.deep_ep_refusals import deep_ep_refusals
from moed.config.engine_config import EngineConfig, ModelConfig
from moed.config.errors import ConfigError
from moed.config.machine import Machine
from moed.config.refusals import check, refusals
from moed.config.resolve import assemble
from moed.config.settings import ServeSettings
from tests.config.deep_ep_backends import ELASTIC, HIGH_THROUGHPUT, LOW_LATENCY, backends

GIB = 2**30
MODEL: Mapping[str, Any] = {
    "path": "",
    "model": "org/name",
    "revision": None,
    "served_model_names": (),
    "architecture": "",
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "load_format": "auto",
    "seed": 0,
    "num_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "vocab_size": 1000,
    "num_experts": 64,
    "top_k": 8,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 4096,
    "hf_config": {},
    "generation_config": {},
}
ROOMY = Machine(gpu="some", gpus_per_node=8, gpu_memory_bytes=None)


def make(
    backend: str,
    ranks: int,
    tokens: int | None = 128,
    machine: Machine = ROOMY,
    device: str = "cuda",
    settings: Mapping[str, Any] | None = None,
    **model: Any,
) -> EngineConfig:
    """A configuration that has not been held against any limit."""
    asked = ServeSettings(
        all2all_backend=backend,
        data_parallel_size=ranks,
        max_num_batched_tokens=tokens,
        device=device,
        **(settings or {}),
    )
    read = ModelConfig(**{**MODEL, **model})
    return assemble(asked, backends(), machine, lambda _: read).config


def of_deep_ep(config: EngineConfig, machine: Machine = ROOMY) -> list[str]:
    return refusals(config, machine)


def nodes(count: int, per_node: int = 8) -> Machine:
    return Machine(gpu="some", gpus_per_node=per_node, num_nodes=count)


@pytest.mark.parametrize("backend", [LOW_LATENCY, HIGH_THROUGHPUT, ELASTIC])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_fitting_configuration_is_not_refused(backend: str, ranks: int) -> None:
    assert refusals(make(backend, ranks), ROOMY) == []


@pytest.mark.parametrize(
    ("backend", "model", "parts"),
    [
        # gpt-oss, whose hidden size lies between two that are compiled.
        (LOW_LATENCY, {"hidden_size": 2880}, ("is 2880", "2560 or 3072", "all2allv")),
        (LOW_LATENCY, {"hidden_size": 16384}, ("is 16384", "nearest: 8192", "all2allv")),
        (LOW_LATENCY, {"top_k": 12}, ("at most 11", "chooses 12", "all2allv")),
        (LOW_LATENCY, {"num_experts": 1856}, ("2 to 1848 experts", "has 1856", "all2allv")),
        (LOW_LATENCY, {"num_experts": 60}, ("60 do not divide over 8 ranks", "take 6 or 10 ranks")),
        (LOW_LATENCY, {"dtype": "float16"}, ("bfloat16 rows", "is float16", "--dtype bfloat16")),
        (HIGH_THROUGHPUT, {"hidden_size": 2004}, ("multiple of 16", "2004 makes 4008", "2000 and")),
        (HIGH_THROUGHPUT, {"top_k": 33}, ("at most 32", "chooses 33", "all2allv")),
        (
            HIGH_THROUGHPUT,
            {"num_experts": 1032},
            ("at most 128 experts on a rank", "1032 over 8 ranks are 129", "at least 9 ranks"),
        ),
        (ELASTIC, {"hidden_size": 2880}, ("multiple of 256", "is 2880", "2816 and 3072")),
        (ELASTIC, {"hidden_size": 2888}, ("multiple of 32", "2888 makes 5776", "2880 and 2896")),
        (ELASTIC, {"top_k": 33}, ("at most 32", "chooses 33", "all2allv")),
        (ELASTIC, {"num_experts": 2056}, ("at most 2048 experts", "has 2056", "all2allv")),
        (
            ELASTIC,
            {"num_experts": 2056},
            ("at most 256 experts on a rank", "2056 over 8 ranks are 257", "at least 9 ranks"),
        ),
        (ELASTIC, {"dtype": "float32"}, ("bfloat16 rows", "is float32", "--dtype bfloat16")),
    ],
)
def test_limits_of_the_model(backend: str, model: dict[str, Any], parts: tuple[str, ...]) -> None:
    found = of_deep_ep(make(backend, 8, **model))
    assert any(all(part in entry for part in parts) for entry in found), found


@pytest.mark.parametrize(
    ("backend", "ranks", "machine", "parts"),
    [
        (HIGH_THROUGHPUT, 1, ROOMY, ("2, 4, 8, 16", "there are 1", "take 2")),
        (HIGH_THROUGHPUT, 6, ROOMY, ("2, 4, 8, 16", "there are 6", "take 4 or 8")),
        (HIGH_THROUGHPUT, 40, nodes(5), ("144, 160 ranks", "there are 40", "take 32 or 48")),
        (LOW_LATENCY, 4, nodes(2), ("8 GPUs of each node", "4 ranks on 2 nodes are 2", "16 ranks")),
        (LOW_LATENCY, 16, nodes(4, 4), ("16 ranks on 4 nodes are 4", "2 node(s) with 8 GPUs")),
        (HIGH_THROUGHPUT, 16, nodes(4, 4), ("16 ranks on 4 nodes are 4", "2 node(s) with 8 GPUs")),
        (LOW_LATENCY, 12, nodes(1, 16), ("whole nodes of 8", "there are 12", "take 8 or 16")),
        (ELASTIC, 68, nodes(1, 68), ("at most 64 ranks on a node, not 68", "take 64")),
        (ELASTIC, 34, nodes(34, 1), ("at most 32 nodes, not 34", "take 32")),
    ],
)
def test_limits_of_the_ranks(
    backend: str, ranks: int, machine: Machine, parts: tuple[str, ...]
) -> None:
    # So many experts that each number of ranks divides them.
    config = make(backend, ranks, machine=machine, num_experts=ranks * 4)
    found = of_deep_ep(config, machine)
    assert len(found) == 1
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize(("ranks", "num_nodes"), [(8, 1), (16, 2), (64, 8)])
@pytest.mark.parametrize("backend", [LOW_LATENCY, HIGH_THROUGHPUT, ELASTIC])
def test_whole_nodes_are_not_refused(backend: str, ranks: int, num_nodes: int) -> None:
    machine = nodes(num_nodes)
    assert of_deep_ep(make(backend, ranks, machine=machine), machine) == []


def test_a_high_throughput_buffer_that_32_bits_do_not_count() -> None:
    machine = nodes(18)
    sizes: dict[str, Any] = {"num_experts": 144, "hidden_size": 32768}
    found = of_deep_ep(make(HIGH_THROUGHPUT, 144, machine=machine, **sizes), machine)
    assert [("NVLink" in entry, "RDMA" in entry) for entry in found] == [(1, 0), (0, 1)]
    for entry in found:
        assert "2147483647" in entry
        assert "32768 on 144 ranks" in entry
        assert "take at most 8 ranks" in entry


def test_experts_of_a_node_across_nodes() -> None:
    machine = nodes(2)
    config = make(HIGH_THROUGHPUT, 16, machine=machine, num_experts=1040)
    (found,) = of_deep_ep(config, machine)
    for part in ("at most 512 experts on a node", "1040 over 16 ranks are 520", "at least 24"):
        assert part in found


def test_a_budget_whose_buffer_is_too_large_names_the_largest_that_is_not() -> None:
    sizes: dict[str, Any] = {"hidden_size": 7168, "num_experts": 256}
    (found,) = refusals(make(LOW_LATENCY, 8, 4096, **sizes), ROOMY)
    largest = int(found.rsplit(" ", 1)[1])
    assert "4096 tokens per rank" in found
    assert "under 34359738368 (32 GiB)" in found
    assert refusals(make(LOW_LATENCY, 8, largest, **sizes), ROOMY) == []
    assert refusals(make(LOW_LATENCY, 8, largest + 1, **sizes), ROOMY) != []


@pytest.mark.parametrize(
    ("depth", "tokens", "parts"),
    [
        ("1024", 512, ("is 1024", "2 x (512 + 1) = 1026", "set 2048", "at most 511")),
        ("2048", 1024, ("is 2048", "2 x (1024 + 1) = 2050", "set 4096", "at most 1023")),
        ("1", 128, ("is 1,", "= 258", "set 1024, or unset it")),
        ("many", 128, ("is 'many'", "set 1024")),
    ],
)
def test_qp_depth_that_is_set_too_low(depth: str, tokens: int, parts: tuple[str, ...]) -> None:
    machine = Machine(gpu="some", gpus_per_node=8, qp_depth=depth)
    (found,) = refusals(make(LOW_LATENCY, 8, tokens, machine), machine)
    for part in ("NVSHMEM_QP_DEPTH", *parts):
        assert part in found


@pytest.mark.parametrize(("depth", "tokens"), [("1024", 511), ("1026", 512), (None, 1024)])
def test_qp_depth_that_is_enough(depth: str | None, tokens: int) -> None:
    machine = Machine(gpu="some", gpus_per_node=8, qp_depth=depth)
    assert refusals(make(LOW_LATENCY, 8, tokens, machine), machine) == []


@pytest.mark.parametrize(
    ("ranks", "tokens", "parts"),
    [
        (2, 129, ("2 x 129 is 258", "multiple of 4", "--max-num-batched-tokens to 130")),
        (1, 126, ("1 x 126 is 126", "multiple of 4", "--max-num-batched-tokens to 128")),
    ],
)
def test_rows_that_do_not_make_whole_packets(
    ranks: int, tokens: int, parts: tuple[str, ...]
) -> None:
    asked = question(make(LOW_LATENCY, ranks), ROOMY)
    (found,) = deep_ep_refusals(replace(asked, num_tokens=tokens), emulated=False)
    for part in parts:
        assert part in found
    fitting = replace(asked, num_tokens=int(found.rsplit(" ", 1)[1]))
    assert deep_ep_refusals(fitting, emulated=False) == []
    assert deep_ep_refusals(replace(asked, num_tokens=tokens), emulated=True) == []


def test_all_refusals_come_together() -> None:
    machine = Machine(gpu="some", gpus_per_node=8, qp_depth="1024")
    config = make(LOW_LATENCY, 8, 600, machine, hidden_size=2880, top_k=16, num_experts=60)
    found = refusals(config, machine)
    assert len(found) == 4
    with pytest.raises(ConfigError) as caught:
        check(config, machine)
    assert all(entry in str(caught.value) for entry in found)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("backend", "ranks", "model"),
    [
        (LOW_LATENCY, 3, {"hidden_size": 100, "dtype": "float32", "num_experts": 6}),
        (HIGH_THROUGHPUT, 3, {"hidden_size": 100, "dtype": "float32", "num_experts": 6}),
        (ELASTIC, 3, {"hidden_size": 100, "dtype": "float32", "num_experts": 6}),
    ],
)
def test_the_emulation_on_a_cpu_is_lifted_of_what_only_kernels_need(
    backend: str, ranks: int, model: dict[str, Any]
) -> None:
    assert refusals(make(backend, ranks, 5, device="cpu", **model), ROOMY) == []
    assert refusals(make(backend, ranks, 5, device="cuda", **model), ROOMY) != []


@pytest.mark.parametrize(
    ("backend", "model", "part"),
    [
        (LOW_LATENCY, {"top_k": 12}, "at most 11"),
        (LOW_LATENCY, {"num_experts": 63}, "63 do not divide"),
        (HIGH_THROUGHPUT, {"top_k": 33}, "at most 32"),
        (ELASTIC, {"num_experts": 2056}, "at most 2048"),
    ],
)
def test_the_emulation_keeps_the_other_limits(
    backend: str, model: dict[str, Any], part: str
) -> None:
    assert part in "".join(refusals(make(backend, 8, device="cpu", **model), ROOMY))


def test_more_ranks_than_gpus() -> None:
    (found,) = refusals(make("all2allv", 9), ROOMY)
    assert found.startswith("9 ranks")
    assert "take at most 8" in found
    assert refusals(make("all2allv", 8), ROOMY) == []


def gpu(memory: int) -> Machine:
    return Machine(gpu="some", gpus_per_node=8, gpu_memory_bytes=memory)


# 64 experts x 3 x 4096 x 4096 x 2 bytes x 2 layers: 12 GiB in all.
LARGE: dict[str, Any] = {"moe_intermediate_size": 4096}


def test_weights_that_do_not_fit_name_how_many_ranks_do() -> None:
    machine = gpu(4 * GIB)
    (found,) = refusals(make("all2allv", 2, machine=machine, **LARGE), machine)
    assert "4.0 GiB x 0.92 (--gpu-memory-utilization) = 3.7 GiB" in found
    assert "weights 6.0 GiB" in found
    # 4 ranks have room for weights of 3.0 GiB, and not for 0.6 GiB of workspace beside them.
    assert "--data-parallel-size 8" in found
    assert refusals(make("all2allv", 8, machine=machine, **LARGE), machine) == []


def test_a_budget_that_does_not_fit_names_one_that_does() -> None:
    machine = gpu(4 * GIB)
    (found,) = refusals(make("all2allv", 8, 2**16, machine, **LARGE), machine)
    largest = int(found.rsplit(" ", 1)[1])
    assert refusals(make("all2allv", 8, largest, machine, **LARGE), machine) == []
    assert refusals(make("all2allv", 8, largest + 64, machine, **LARGE), machine) != []


def test_what_fits_nowhere() -> None:
    machine = gpu(GIB // 64)
    (found,) = refusals(make("all2allv", 2, machine=machine, **LARGE), machine)
    assert found.endswith("take GPUs with more memory, or a smaller model")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"kv_cache_memory": 8 * GIB}, ("set to 8.0 GiB", "--kv-cache-memory to at most")),
        ({"num_kv_blocks": 10**6}, ("set to 61.0 GiB", "--num-kv-blocks to at most")),
        (
            {"kv_cache_memory": 4096 * 128, "max_model_len": 4096},
            ("max_model_len is 4096", "holds 128 tokens of 4096 bytes", "at most 128"),
        ),
    ],
)
def test_kv_cache_that_was_set(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    machine = gpu(4 * GIB)
    (found,) = refusals(make("all2allv", 8, machine=machine, settings=settings), machine)
    for part in parts:
        assert part in found
