"""Logits of random checkpoints, by several families, against `transformers`.

Truth is float32 on a CPU, of the same rounded weights. In 16 bits nothing equals it; what counts is
that moed is as near to it as `transformers` in the same 16 bits.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.report import Report
from tests.gpu.setup import Setup, one_process
from tests.moe.checkpoints import make_model, prompt, true_greedy, true_logits
from tests.moe.harness import Stepper, load

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
TINY_FAMILIES = ("qwen3_moe",)
# Heads that FlashInfer knows.
CHANGES: dict[str, dict[str, Any]] = {"qwen3_moe": {"head_dim": 64}, "mixtral": {"head_dim": 64}}
EXACT = 1e-3
# How much farther from the truth than `transformers` moed may be: sums have another order.
RATIO = 2.0
NUM_PROMPT, NUM_GREEDY, PIECE = 60, 8, 16


def run(setup: Setup, report: Report) -> None:
    """In float32, and on a GPU in bfloat16 too, with each kind of attention that there is."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in TINY_FAMILIES if setup.tiny else FAMILIES:
        with report.attempt(family):
            _check_family(setup, report, family)


def _check_family(setup: Setup, report: Report, family: str) -> None:
    model = make_model(family, **CHANGES.get(family, {}))
    tokens = prompt(NUM_PROMPT, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found, greedy = _ours(setup, Path(folder), "float32", "sdpa", tokens)
        difference = float((found - true_logits(model, tokens)).abs().max())
        report.check(f"{family} float32: largest difference of a logit", difference, EXACT)
        same = greedy == true_greedy(model, tokens, NUM_GREEDY)
        report.holds(f"{family} float32: the same {NUM_GREEDY} greedy tokens", same)
    if setup.device == "cuda":
        _check_halves(setup, report, family, model, tokens)


def _check_halves(setup: Setup, report: Report, family: str, model: Any, tokens: list[int]) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    truth = true_logits(copy.deepcopy(half).float(), tokens)
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=setup.torch_device)
        theirs = half.to(setup.torch_device)(input_ids=ids).logits[0].float().cpu()
    limit = RATIO * _error(theirs, truth)
    with tempfile.TemporaryDirectory() as folder:
        half.save_pretrained(folder)
        backends = ["sdpa"]
        if family in CHANGES and "flashinfer" in setup.packages():
            backends.append("flashinfer")
        for backend in backends:
            found, _ = _ours(setup, Path(folder), "bfloat16", backend, tokens)
            report.check(f"{family} bfloat16, {backend}: error", _error(found, truth), limit)


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def _ours(
    setup: Setup, folder: Path, dtype: str, attention: str, tokens: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, in pieces, and the greedy tokens after it."""
    config = setup.config(folder, dtype=dtype, attention_backend=attention)
    with one_process(config) as groups:
        device = setup.torch_device
        stepper = Stepper(config, load(config, groups, device), device=device)
        parts = [
            stepper.step({"a": tokens[start : start + PIECE]})["a"]
            for start in range(0, len(tokens), PIECE)
        ]
        found = torch.cat(parts).float().cpu()
        greedy = [int(found[-1].argmax())]
        while len(greedy) < NUM_GREEDY:
            greedy.append(int(stepper.step({"a": greedy[-1:]})["a"][-1].argmax()))
    return found, greedy
