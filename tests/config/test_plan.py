"""`moed plan`: what it reckons for known models, how it reads, and what a launch refuses too."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moed.config import machine
from moed.config.cli import parse
from moed.config.errors import ConfigError, ModelError, UsageError
from moed.config.machine import Machine
from moed.config.plan import make_plan
from moed.config.plan_settings import PlanSettings
from moed.config.plan_text import full_json, full_text, launch_text
from moed.config.planning import FullPlan, plan_settings
from moed.config.resolve import resolve, resolve_and_explain
from tests.config.deep_ep_backends import (
    DEEPSEEK_V3,
    ELASTIC,
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    MIXTRAL_8X7B,
    QWEN3_30B,
    backends,
)

GIB = 2**30
MakePlan = Callable[..., FullPlan]
NUM_WEIGHTS = {
    "qwen3": (QWEN3_30B, 30_532_122_624),
    "mixtral": (MIXTRAL_8X7B, 46_702_792_704),
    # 671 billion, without the module that predicts a second token.
    "deepseek": (DEEPSEEK_V3, 671_026_419_200),
}


@pytest.fixture
def make_full_plan(tmp_path: Path) -> MakePlan:
    """Plans a config.json as the command line would."""

    def make(content: Mapping[str, Any], *words: str) -> FullPlan:
        path = tmp_path / "model.json"
        path.write_text(json.dumps(content))
        command = parse(["plan", str(path), *words])
        assert command.settings is not None and command.plan is not None
        return plan_settings(command.settings, command.plan, backends())

    return make


@pytest.mark.parametrize(("content", "count"), NUM_WEIGHTS.values(), ids=NUM_WEIGHTS)
def test_one_rank_holds_every_weight(
    make_full_plan: MakePlan, content: Mapping[str, Any], count: int
) -> None:
    plain = {key: value for key, value in content.items() if key != "quantization_config"}
    plan = make_full_plan(plain).plan
    held = sum(plan.weights.values()) // 2
    if content is QWEN3_30B:
        # Norms of queries and keys are held once for each head, and stored once for a layer.
        held -= 48 * (32 + 4 - 2) * 128
    if content is DEEPSEEK_V3:
        # Its router is held in float32.
        held -= plan.weights["router"] // 4
    assert held == count


def test_the_bundled_model_weighs_what_its_file_holds() -> None:
    command = parse(["plan"])
    assert command.settings is not None
    plan = plan_settings(command.settings, PlanSettings(), backends()).plan
    with (Path(plan.config.model.path) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    stored = sum(math.prod(entry["shape"]) for entry in header.values())
    model = plan.config.model
    heads = model.num_attention_heads + model.num_kv_heads
    # As above, norms of queries and keys are held once for each head.
    stored += model.num_layers * (heads - 2) * model.head_dim
    assert sum(plan.weights.values()) == stored * 4


def test_qwen3_on_eight_ranks(make_full_plan: MakePlan) -> None:
    plan = make_full_plan(QWEN3_30B, "-dp", "8").plan
    assert plan.refusals == ()
    assert plan.weights["experts"] == 48 * 16 * 3 * 2048 * 768 * 2
    assert plan.weights["embedding"] == plan.weights["head"] == 151936 * 2048 * 2
    assert plan.weights["dense MLP"] == plan.weights["shared experts"] == 0
    assert plan.kv_cache.bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert plan.memory.left == int(80 * GIB * 0.92) - plan.memory.fixed
    tokens = plan.memory.left // (plan.kv_cache.bytes_per_token * 16) * 16
    assert plan.kv_cache.num_tokens == tokens
    received, by_expert, context, masks, _ = plan.workspace
    # 2**18 rows of requests that decode together, of one layer; pieces of prompts of all lengths.
    assert context.num_bytes == 2**18 * 2 * 4 * 128 * 2
    assert masks.num_bytes == 2048 * 40960 * (2 + 2)
    assert received.num_bytes == 8 * 2048 * 2048 * 2
    assert by_expert.num_bytes == 8 * 2048 * 8 * (2048 * 6 + 2 * 768 * 2)
    assert (plan.budget.tokens, plan.budget.why) == (2048, "the default")
    assert plan.budget.needed_qp_depth is None


def test_mixtral_with_low_latency_buffers(make_full_plan: MakePlan) -> None:
    words = ("-dp", "4", "--all2all-backend", LOW_LATENCY, "--max-num-batched-tokens", "600")
    plan = make_full_plan(MIXTRAL_8X7B, *words).plan
    assert plan.refusals == ()
    assert plan.weights["experts"] == 32 * 2 * 3 * 4096 * 14336 * 2
    # Experts have the size that others call that of a dense MLP.
    assert plan.weights["dense MLP"] == 0
    assert plan.budget.needed_qp_depth == 2048
    assert plan.workspace[0].num_bytes == 8 * 600 * 4096 * 2
    assert any("600 tokens per rank are more than the 256" in note for note in plan.notes)


def test_deepseek_with_low_latency_buffers(make_full_plan: MakePlan) -> None:
    words = ("-dp", "64", "--all2all-backend", LOW_LATENCY, "--max-num-batched-tokens", "128")
    plan = make_full_plan(DEEPSEEK_V3, *words, "--max-num-seqs", "64").plan
    # A byte each, and four for each block of 128 x 128.
    assert plan.weights["experts"] == 58 * 4 * 3 * (7168 * 2048 + 56 * 16 * 4)
    assert any("its experts stay in FP8" in note for note in plan.notes)
    assert plan.weights["shared experts"] == 58 * 3 * 7168 * 2048 * 2
    assert plan.weights["dense MLP"] == 3 * 3 * 7168 * 18432 * 2
    assert plan.kv_cache.bytes_per_token == 61 * (512 + 64) * 2
    heap, fixed = plan.dispatch
    assert (heap.num_bytes, fixed.num_bytes) == (2 * GIB, 32 * 2**20)
    assert "1908410496 B" in heap.formula
    assert any("quantised (fp8)" in note for note in plan.notes)
    assert plan.refusals == ()


def test_a_model_that_is_not_served_is_reckoned(make_full_plan: MakePlan) -> None:
    content = {**DEEPSEEK_V3, "model_type": "deepseek_v32"}
    plan = make_full_plan(content, "-dp", "8").plan
    assert plan.kv_cache.bytes_per_token == 61 * (512 + 64) * 2
    refusal = plan.refusals[0]
    assert "model_type is 'deepseek_v32', which needs a sparse indexer" in refusal
    assert "model.json" in refusal


@pytest.mark.parametrize(
    ("backend", "nodes", "num_bytes"),
    [
        (HIGH_THROUGHPUT, 1, [335709952, 32 * 2**20]),
        (ELASTIC, 1, [16 * 2**20, 14 * 2**20]),
        (HIGH_THROUGHPUT, 2, [377683840, 2**29, 32 * 2**20]),
        (ELASTIC, 2, [72 * 2**20, 14 * 2**20]),
    ],
)
def test_buffers_of_deepseek(
    make_full_plan: MakePlan, backend: str, nodes: int, num_bytes: list[int]
) -> None:
    words = ("-dp", str(8 * nodes), "--all2all-backend", backend)
    plan = make_full_plan(DEEPSEEK_V3, *words, "--max-num-batched-tokens", "128").plan
    assert plan.machine.num_nodes == nodes
    found = [item.num_bytes for item in plan.dispatch]
    assert [size - size % 2**20 for size in found] == [size - size % 2**20 for size in num_bytes]


def test_every_backend_is_shown_with_its_own_budget(make_full_plan: MakePlan) -> None:
    full = make_full_plan(QWEN3_30B, "-dp", "8", "--all2all-backend", LOW_LATENCY)
    assert full.plan.budget.tokens == 256
    found = {entry.name: entry.plan for entry in full.alternatives}
    assert sorted(found) == [
        "all2allv",
        "allgather_reducescatter",
        ELASTIC,
        HIGH_THROUGHPUT,
        "local",
    ]
    assert found["local"] is None
    gathered = found["allgather_reducescatter"]
    assert gathered is not None
    assert gathered.budget.tokens == 2048
    assert gathered.dispatch[0].num_bytes == 8 * 2048 * (4096 + 64)


def test_contradictions_are_all_told_beside_the_limits(make_full_plan: MakePlan) -> None:
    words = "-dp 7 --max-num-batched-tokens 8 --max-num-seqs 16 --num-kv-blocks 4".split()
    words += "--kv-cache-memory 1GiB --no-enable-expert-parallel --dtype half".split()
    plan = make_full_plan(QWEN3_30B, *words, "--all2all-backend", LOW_LATENCY).plan
    for part in (
        "max_num_seqs is 16 and max_num_batched_tokens is 8",
        "num_kv_blocks is 4 and kv_cache_memory is",
        "enable_expert_parallel is off",
        "128 do not divide over 7 ranks",
        "dtype is float16",
    ):
        assert sum(part in entry for entry in plan.refusals) == 1, part
    # What could be planned was: B is as asked.
    assert plan.budget.tokens == 8
    assert len(plan.refusals) == 5


def test_an_unknown_backend_is_a_refusal_too(make_full_plan: MakePlan) -> None:
    plan = make_full_plan(QWEN3_30B, "-dp", "8", "--all2all-backend", "deepep").plan
    (found,) = plan.refusals
    assert "'deepep': available are auto, all2allv" in found
    assert plan.config.parallel.backend.name == "all2allv"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("-dp 8", False),
        ("-dp 8 --all2all-backend low_latency", False),
        ("-dp 8 --all2all-backend low_latency --max-num-batched-tokens 64k", True),
        ("-dp 3 --all2all-backend high_throughput --dtype half", True),
        ("-dp 6 --all2all-backend elastic", True),
        ("-dp 8 --max-num-batched-tokens 4M", True),
        ("-dp 9", True),
    ],
)
def test_a_launch_refuses_the_same(
    make_full_plan: MakePlan,
    words: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = make_full_plan(QWEN3_30B, *words.split(), "--nnodes", "1").plan
    assert bool(found.refusals) == refused
    here = Machine(gpu="some", gpus_per_node=8, gpu_memory_bytes=80 * GIB)
    monkeypatch.setattr(machine, "this_machine", lambda device: here)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    command = parse(["serve", str(tmp_path), "--load-format", "dummy", *words.split()])
    assert command.settings is not None
    if not refused:
        resolution = resolve_and_explain(command.settings, backends(), weights=True)
        text = launch_text(make_plan(resolution.config, here, resolution.decided))
        # Line by line, but for the first, which names the model as given.
        assert text.splitlines()[1:] == launch_text(found).splitlines()[1:]
        return
    with pytest.raises(ConfigError) as caught:
        resolve(command.settings, backends())
    # The model is named as given: by its file there, by its folder here.
    expected = "; ".join(found.refusals).replace(str(tmp_path / "model.json"), str(tmp_path))
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("words", "num_refusals", "tokens"),
    [
        ("-dp 8 --gpu-memory 80GiB", 0, None),
        ("-dp 8 --gpu-memory=8GiB", 1, 0),
        ("-dp 4 --gpus_per_node 2 --nnodes 2", 0, None),
        ("-dp 4 --gpus-per-node 2 --nnodes 1", 1, None),
        ("-dp 8 --kv-cache-memory 1GiB", 0, 10912),
    ],
)
def test_the_machine_that_is_planned_for(
    make_full_plan: MakePlan, words: str, num_refusals: int, tokens: int | None
) -> None:
    plan = make_full_plan(QWEN3_30B, *words.split()).plan
    assert len(plan.refusals) == num_refusals
    if tokens is not None:
        assert plan.kv_cache.num_tokens == tokens


def test_a_cpu_is_planned_for_with_the_memory_at_hand(
    make_full_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10**9)
    words = ("-dp", "3", "--device", "cpu", "--all2all-backend", HIGH_THROUGHPUT)
    plan = make_full_plan({**MIXTRAL_8X7B, "num_local_experts": 6}, *words).plan
    assert plan.refusals == ()
    assert plan.kv_cache.num_tokens is None
    assert plan.budget.largest_why == "memory that is free now"
    largest = ("--max-num-batched-tokens", str(plan.budget.largest))
    again = make_full_plan({**MIXTRAL_8X7B, "num_local_experts": 6}, *words, *largest)
    assert again.plan.refusals == ()


def test_a_folder_and_the_bundled_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    for words, model_type in (([str(tmp_path)], "qwen3_moe"), ([], "qwen3_moe")):
        command = parse(["plan", *words])
        assert command.settings is not None
        full = plan_settings(command.settings, PlanSettings(), backends())
        assert full.plan.config.model.model_type == model_type


def test_what_no_plan_can_be_made_of(make_full_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_experts"):
        make_full_plan({**QWEN3_30B, "num_experts": None})
    command = parse(["plan", str(tmp_path / "nowhere.json")])
    assert command.settings is not None
    with pytest.raises(ModelError):
        plan_settings(command.settings, PlanSettings(), backends())


def test_the_tables(make_full_plan: MakePlan) -> None:
    words = ("-dp", "12", "--all2all-backend", LOW_LATENCY, "--dtype", "half")
    text = full_text(make_full_plan(QWEN3_30B, *words))
    assert all(len(line) <= 100 for line in text.splitlines() if "/" not in line)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for part in (
        "12 ranks (DP 12 x TP 1) on 2 nodes, cuda with 80.0 GiB each; all2all_backend low_latency",
        "experts 4.6 GiB",
        "a token 96.0 KiB 48 layers x 2 x 4 KV heads x 128 x 2 B",
        "NVSHMEM_QP_DEPTH 1024 needed: at least 2 x (256 + 1); not set, so moed sets it",
    ):
        assert part in lines
    assert "refused, for 3 reasons" in text
    # Flags stay whole, so that they can be copied.
    assert "--all2all-backend" in text
    fine = full_text(make_full_plan(QWEN3_30B, "-dp", "8"))
    assert fine.endswith("nothing speaks against it\n")


def test_json(make_full_plan: MakePlan) -> None:
    words = ("-dp", "8", "--all2all-backend", LOW_LATENCY, "--json")
    full = make_full_plan(DEEPSEEK_V3, *words)
    found = json.loads(full_json(full))
    assert found["weights_bytes"]["total"] == full.plan.memory.weights
    assert found["dispatch_bytes"]["NVSHMEM heap"] == 4 * GIB
    assert found["needed_nvshmem_qp_depth"] == 1024
    assert found["refusals"] == list(full.plan.refusals)
    assert found["other_backends"]["local"] is None
    assert found["other_backends"]["all2allv"]["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize(
    ("words", "error", "part"),
    [
        (["plan", "--gpu-memory"], UsageError, "--gpu-memory needs a value"),
        (["plan", "--nnodes", "-dp"], UsageError, "--nnodes needs a value"),
        (["plan", "--json=true"], UsageError, "--json takes no value"),
        (["plan", "--gpu-memory", "80 apples"], ConfigError, "gpu_memory (flag --gpu-memory)"),
        (["plan", "--gpus-per-node", "0"], ConfigError, "at least 1"),
        (["serve", "--gpu-memory", "80GiB"], UsageError, "belongs to `moed plan`"),
        (["plan", "--prot", "1"], UsageError, "did you mean --port"),
    ],
)
def test_flags_that_cannot_be_read(words: list[str], error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        parse(words)
    assert part in str(caught.value)


def moed(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moed.server", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    run = moed("plan", "-dp", "2")
    assert (run.returncode, run.stderr) == (0, "")
    assert "moed-demo" in run.stdout
    path = tmp_path / "model.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    run = moed("plan", str(path), "-dp", "8", "--json")
    assert (run.returncode, run.stderr) == (78, "")
    assert json.loads(run.stdout)["refusals"]


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from moed.config.cli import parse; from moed.server.__main__ import run; "
        "run(parse(['plan'])); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert run.returncode == 0
