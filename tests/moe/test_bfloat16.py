"""In bfloat16: no further from exact logits than `transformers` is, and the same answers."""

import copy
import dataclasses
import random
from itertools import takewhile
from pathlib import Path

import pytest
import torch
import transformers

from moed.config.engine_config import EngineConfig
from moed.config.model import bundled_checkpoint
from tests.moe.checkpoints import make_checkpoint, prompt, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank

KERNELS = ("auto", "torch")
# Root mean square of the error, and of the difference between both, against the error of
# `transformers` in bfloat16. Where rounding changes an expert, both jump: so not just 1.
MOST_DISTANCE = 1.5
# Between the first and the second logit in float32, below which bfloat16 may choose another token.
LEAST_MARGIN = 0.25
NUM_QUESTIONS = 24
MAX_ANSWER_TOKENS = 12


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def fresh(config: EngineConfig, kernels: str) -> Stepper:
    runner = dataclasses.replace(config.runner, cpu_kernels=kernels)
    config = dataclasses.replace(config, runner=runner)
    return Stepper(config, load(config, one_rank()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss"])
def test_logits_are_as_close_as_those_of_transformers(
    tmp_path: Path, family: str, kernels: str
) -> None:
    torch.set_num_threads(1)
    truth = make_checkpoint(family, tmp_path)
    tokens = prompt(60, seed=3)
    # What the checkpoint holds, rounded: both start from the same weights.
    rounded = copy.deepcopy(truth).bfloat16()
    exact = true_logits(copy.deepcopy(rounded).float(), tokens)
    theirs = true_logits(rounded, tokens).float()
    stepper = fresh(engine_config(tmp_path, dtype="bfloat16"), kernels)
    parts = [tokens[:50], *([token] for token in tokens[50:])]
    ours = torch.cat([stepper.step({"a": part})["a"] for part in parts])
    distance = rms(theirs - exact)
    assert distance > 0
    assert rms(ours - exact) <= MOST_DISTANCE * distance
    assert rms(ours - theirs) <= MOST_DISTANCE * distance


def answers(
    dtype: str, kernels: str, questions: list[list[int]], end_id: int
) -> list[list[tuple[int, float]]]:
    """Greedy, all at once: each token, and how far its logit is above the second."""
    config = engine_config(bundled_checkpoint(), dtype=dtype, max_num_batched_tokens=1024)
    stepper = fresh(config, kernels)
    found: list[list[tuple[int, float]]] = [[] for _ in questions]
    pieces = {str(number): ids for number, ids in enumerate(questions)}
    while pieces:
        logits = stepper.step(pieces)
        pieces = {}
        for name, rows in logits.items():
            own = found[int(name)]
            first, second = rows[-1].topk(2).values.tolist()
            own.append((int(rows[-1].argmax()), first - second))
            if own[-1][0] != end_id and len(own) < MAX_ANSWER_TOKENS:
                pieces[name] = [own[-1][0]]
    return found


def clear(answer: list[tuple[int, float]]) -> list[int]:
    """Its tokens before the first one that a change of LEAST_MARGIN could turn into another."""
    return [token for token, _ in takewhile(lambda entry: entry[1] > LEAST_MARGIN, answer)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_bundled_model_answers_the_same(kernels: str) -> None:
    """Token for token, up to where float32 itself all but wavers: that is rare."""
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_checkpoint())
    chance, questions, sums = random.Random(4), [], []
    for _ in range(NUM_QUESTIONS):
        first, second = chance.randrange(100), chance.randrange(100)
        messages = [{"role": "user", "content": f"What is {first} + {second}?"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        questions.append(tokenizer(text, add_special_tokens=False).input_ids)
        sums.append(str(first + second))
    end_id = tokenizer.vocab["<|im_end|>"]
    exact = answers("float32", kernels, questions, end_id)
    rounded = answers("bfloat16", kernels, questions, end_id)
    firm = [clear(answer) for answer in exact]
    for ids, answer in zip(firm, rounded, strict=True):
        assert [token for token, _ in answer[: len(ids)]] == ids
    num_firm = sum(len(a) == len(b) for a, b in zip(firm, exact, strict=True))
    assert num_firm >= 0.9 * NUM_QUESTIONS
    said = [tokenizer.decode([token for token, _ in answer[:-1]]) for answer in exact]
    num_right = sum(a == b for a, b in zip(said, sums, strict=True))
    # The model itself gets one in fifty or so wrong; what counts is that it says the same.
    assert num_right >= 0.9 * NUM_QUESTIONS
