"""The bundled model behind the whole daemon, over HTTP, against `transformers`; with graphs, where
there are any, and without.
"""

import random
from typing import Any

import torch

from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon
from tests.gpu.report import Report
from tests.gpu.setup import Setup

START_S = 90.0
# Of a logprob, in float32.
TOLERANCE = 1e-3
NUM_PROMPTS, NUM_TOKENS = 6, 12


def run(setup: Setup, report: Report) -> None:
    """One daemon with graphs, one without; a CPU has none."""
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(
        str(bundled_checkpoint()), dtype=torch.float32
    )
    oracle.eval()
    common = ("--device", setup.device, "--dtype", "float32", "--kv-cache-memory", "256MiB")
    variants: dict[str, tuple[str, ...]] = {"eager": ("--enforce-eager",)}
    if setup.device == "cuda":
        variants["with graphs"] = ()
    answers = {}
    for name, words in variants.items():
        with Daemon(*common, *words, ranks=1) as daemon:
            daemon.wait_ready(START_S)
            found = [_answer(daemon, oracle, seed) for seed in range(NUM_PROMPTS)]
            daemon.assert_alive()
        answers[name] = [tokens for tokens, _ in found]
        worst = max(difference for _, difference in found)
        report.check(f"{name}: logprobs of greedy tokens against transformers", worst, TOLERANCE)
    if len(answers) == 2:
        report.holds(
            "the same tokens with graphs and without", len(set(map(str, answers.values()))) == 1
        )


def _answer(daemon: Daemon, oracle: Any, seed: int) -> tuple[list[int], float]:
    """Greedy tokens, and how far their logprobs are from the best that `transformers` sees."""
    generator = random.Random(seed)
    prompt = [generator.randrange(20, 500) for _ in range(3 + 17 * seed)]
    choice = daemon.complete(prompt, NUM_TOKENS, logprobs=1)["choices"][0]
    tokens: list[int] = choice["token_ids"]
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([prompt + tokens])).logits[0].float()
    best = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1].max(dim=-1).values
    told = torch.tensor(choice["logprobs"]["token_logprobs"])
    return tokens, float((best - told).abs().max())
