"""Decode steps with replayed graphs and without: the same logits, and the time of a step."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from moed.config.graphs import EAGER, graph_shapes
from moed.dist.dp_metadata import DPMetadata
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import KVCache
from moed.server.graph_inputs import GraphInputs
from moed.server.graph_runner import GraphRunner
from moed.server.graphs import recorder_for
from moed.server.model_runner import ModelRunner, Runner
from tests.gpu.report import Report
from tests.gpu.setup import Setup, one_process
from tests.moe.harness import load

BLOCK_SIZE = 16
# Qwen3-30B-A3B's layers, a few of them.
LARGE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
TINY = LARGE | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
LARGE_ROWS, TINY_ROWS = (1, 8, 64), (1, 3)
LARGE_CONTEXT, TINY_CONTEXT = 500, 20
NUM_STEPS, NUM_TIMED = 8, 20
# Of the logits' spread: the same kernels, on tables of another width.
TOLERANCES = {torch.bfloat16: 5e-2, torch.float32: 1e-4}


def run(setup: Setup, report: Report) -> None:
    """With torch's attention, and with FlashInfer's where it is installed."""
    backends = ["sdpa"]
    if setup.device == "cuda" and "flashinfer" in setup.packages():
        backends.append("flashinfer")
    with tempfile.TemporaryDirectory() as folder:
        content = TINY if setup.tiny else LARGE
        (Path(folder) / "config.json").write_text(json.dumps(content))
        for backend in backends:
            with report.attempt(backend):
                _check_backend(setup, report, Path(folder), backend)


def _check_backend(setup: Setup, report: Report, folder: Path, backend: str) -> None:
    config = setup.config(folder, load_format="dummy", dtype="auto", attention_backend=backend)
    rows = TINY_ROWS if setup.tiny else LARGE_ROWS
    context = TINY_CONTEXT if setup.tiny else LARGE_CONTEXT
    longest = context + NUM_STEPS + 1
    per_request = -(-longest // BLOCK_SIZE)
    num_blocks = max(rows) * per_request
    device = setup.torch_device
    with one_process(config) as groups:
        decoder = load(config, groups, device)
        cache = _filled_cache(setup, config.model, num_blocks + 1)
        eager = ModelRunner(decoder, cache, BLOCK_SIZE, device)
        shapes = graph_shapes(rows, longest, BLOCK_SIZE, copies_context=decoder.copies_context)
        inputs = GraphInputs(shapes, BLOCK_SIZE, (num_blocks, None), device)
        graphs = GraphRunner(eager, shapes, inputs, recorder_for(device), config.parallel, 0)
        for count in rows:
            steps = [_step(setup, count, context + at, per_request) for at in range(NUM_STEPS)]
            _compare(setup, report, f"{backend} R={count}", eager, graphs, steps)


def _compare(
    setup: Setup,
    report: Report,
    what: str,
    eager: Runner,
    graphs: Runner,
    steps: list[ForwardBatch],
) -> None:
    worst, num_same, num_all = 0.0, 0, 0
    for batch in steps:
        expected = _run(eager, batch, with_graph=False)
        found = _run(graphs, batch, with_graph=True)
        worst = max(worst, float((found - expected).abs().max() / expected.std()))
        num_same += int((found.argmax(dim=1) == expected.argmax(dim=1)).sum())
        num_all += len(found)
    report.check(f"{what}: logits of a graph, differences", worst, TOLERANCES[setup.dtype])
    report.measure(f"{what}: same tokens", f"{num_same} of {num_all}")
    times = {}
    for name, runner, with_graph in (("eager", eager, False), ("graphs", graphs, True)):

        def one(runner: Runner = runner, with_graph: bool = with_graph) -> list[int]:
            tokens: list[int] = _run(runner, steps[-1], with_graph).argmax(dim=1).tolist()
            return tokens

        times[name] = setup.median_s(one, 3 if setup.tiny else NUM_TIMED)
        report.measure(f"{what}: step, {name}", times[name] * 1e3, "ms")
    report.measure(f"{what}: eager over graphs", times["eager"] / times["graphs"], "x")


def _run(runner: Runner, batch: ForwardBatch, with_graph: bool) -> torch.Tensor:
    graph = runner.graph_for(batch) if with_graph else EAGER
    assert with_graph == (graph != EAGER), "no graph holds the step"
    sizes = torch.tensor([batch.num_tokens], dtype=torch.int32)
    return runner.run(batch, DPMetadata(sizes, 0, 1), graph)


def _step(setup: Setup, num_requests: int, position: int, per_request: int) -> ForwardBatch:
    """A token of each request at `position`, the same tokens whoever runs it."""
    device = setup.torch_device
    tables = torch.arange(num_requests * per_request, device=device).view(num_requests, -1)
    positions = torch.full((num_requests,), position, device=device)
    block, offset = divmod(position, BLOCK_SIZE)
    return ForwardBatch(
        token_ids=(torch.arange(num_requests, device=device) * 31 + position) % 97,
        positions=positions,
        slot_mapping=tables[:, block] * BLOCK_SIZE + offset,
        query_lens=(1,) * num_requests,
        context_lens=(position + 1,) * num_requests,
        block_tables=tables,
        logits_indices=torch.arange(num_requests, device=device),
    )


def _filled_cache(setup: Setup, model: Any, num_blocks: int) -> KVCache:
    """Contexts of random numbers."""
    heads, device = model.num_kv_heads, setup.torch_device
    cache = KVCache(model, heads, num_blocks, num_blocks, BLOCK_SIZE, setup.dtype, device)
    for kept in (*cache.keys, *cache.values):
        kept.copy_(torch.randn(kept.shape, device=device))
    return cache
