"""Trains the demo model from nothing: `python -m moed.moe.demo.train --out DIR`.

Everything is seeded; the run takes about 70 minutes on one free CPU core.
"""

import argparse
import copy
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from moed.moe.demo.chat import Encoder, render, train_tokenizer
from moed.moe.demo.checkpoint_files import write_checkpoint
from moed.moe.demo.corpus import Dialogue, long_dialogue, short_dialogue
from moed.moe.demo.evaluate import Score, examination, measure, report
from moed.moe.demo.model import DemoModel, Shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How the committed checkpoint was made, in the end; its README tells of the way there."""

    seed: int = 7
    num_tokenizer_dialogues: int = 20_000
    num_steps: int = 13000
    num_warmup_steps: int = 200
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-5
    weight_decay: float = 0.01
    balance_weight: float = 0.01
    gradient_norm: float = 1.0
    # Short dialogues fill most steps; every so often a step has rows that hold long ones. Sums are
    # learned first, tool calls last, so that is more often once the sums are there.
    short_rows: tuple[int, int] = (12, 96)
    long_rows: tuple[int, int] = (2, 576)
    long_step_interval: int = 4
    late_step: int = 4500
    late_long_step_interval: int = 2
    evaluation_interval: int = 500
    num_evaluation_questions: int = 60


@dataclass(frozen=True)
class Batch:
    """Rows packed with dialogues, [B, S] each: token ids, dialogue numbers, answer lengths."""

    ids: Tensor
    documents: Tensor
    answer_lengths: Tensor


def batches(recipe: Recipe, encoder: Encoder, rng: Random, first_step: int) -> Iterator[Batch]:
    for step in range(first_step, recipe.num_steps):
        is_late = step >= recipe.late_step
        interval = recipe.late_long_step_interval if is_late else recipe.long_step_interval
        is_long = step % interval == 0
        source = long_dialogue if is_long else short_dialogue
        num_rows, length = recipe.long_rows if is_long else recipe.short_rows
        rows = [packed_row(source, length, encoder, rng) for _ in range(num_rows)]
        yield Batch(*(torch.tensor(part) for part in zip(*rows, strict=True)))


def packed_row(
    source: Callable[[Random], Dialogue], length: int, encoder: Encoder, rng: Random
) -> tuple[list[int], list[int], list[int]]:
    """Dialogues one after another; the last is cut where the row ends: only its tail is lost."""
    ids: list[int] = []
    documents: list[int] = []
    answer_lengths: list[int] = []
    number = 0
    while len(ids) < length:
        dialogue_ids, lengths = encoder.encode(source(rng))
        ids += dialogue_ids
        answer_lengths += lengths
        documents += [number] * len(dialogue_ids)
        number += 1
    return ids[:length], documents[:length], answer_lengths[:length]


def batch_loss(model: DemoModel, batch: Batch, balance_weight: float) -> Tensor:
    """Cross entropy over the answers' tokens only: questions are random and not to be learned.

    A long answer weighs as the root of its length, or lists would drown out the sums.
    """
    hidden: Tensor
    balance: Tensor
    hidden, balance = model(batch.ids, batch.documents)
    lengths = batch.answer_lengths[:, 1:]
    asked = lengths > 0
    logits = model.logits(hidden[:, :-1][asked])
    losses = functional.cross_entropy(logits, batch.ids[:, 1:][asked], reduction="none")
    weights = lengths[asked].rsqrt()
    return (losses * weights).sum() / weights.sum() + balance_weight * balance


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then linearly down to the final rate."""
    warmup = min(1.0, (step + 1) / recipe.num_warmup_steps)
    left = 1 - step / recipe.num_steps
    final = recipe.final_learning_rate
    return warmup * (final + (recipe.learning_rate - final) * left)


def optimizer_of(model: DemoModel, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def rounded(model: DemoModel) -> DemoModel:
    """The model as its checkpoint will be: weights rounded to bfloat16, computed in float32."""
    result = copy.deepcopy(model)
    for parameter in result.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return result.eval()


def evaluated(model: DemoModel, encoder: Encoder, num_questions: int) -> dict[str, Score]:
    def logits(ids: Tensor) -> Tensor:
        hidden, _ = model(ids, torch.zeros_like(ids))
        return model.logits(hidden)

    return measure(logits, encoder, examination(Random(99), num_questions))


def train(recipe: Recipe, out: Path, state_path: Path | None) -> None:
    """Trains and keeps the best checkpoint so far in `out`, by mean accuracy over the skills.

    With `state_path` everything a run needs is kept there too, and a stopped run goes on from it.
    """
    torch.manual_seed(recipe.seed)
    rng = Random(recipe.seed)
    sources = [long_dialogue, *[short_dialogue] * 5]
    count = recipe.num_tokenizer_dialogues
    texts = [
        "".join(text for text, _ in render(sources[i % len(sources)](rng))) for i in range(count)
    ]
    tokenizer = train_tokenizer(texts)
    encoder, shape = Encoder(tokenizer), Shape()
    model = DemoModel(shape)
    optimizer = optimizer_of(model, recipe)
    best, first_step, start = 0.0, 0, time.monotonic()
    if state_path is not None and state_path.exists():
        state = torch.load(state_path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.setstate(state["rng"])
        tokenizer = Tokenizer.from_str(state["tokenizer"])
        encoder = Encoder(tokenizer)
        best, first_step = state["best"], state["step"]
    data = batches(recipe, encoder, rng, first_step)
    for step, batch in enumerate(data, start=first_step + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        loss = batch_loss(model, batch, recipe.balance_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
        optimizer.step()
        if step % 100 == 0:
            elapsed = time.monotonic() - start
            logger.info("step %d, loss %.4f, %.0f s", step, loss.item(), elapsed)
        if step % recipe.evaluation_interval == 0 or step == recipe.num_steps:
            candidate = rounded(model)
            scores = evaluated(candidate, encoder, recipe.num_evaluation_questions)
            mean = sum(score.accuracy for score in scores.values()) / len(scores)
            logger.info("step %d, mean accuracy %.4f\n%s", step, mean, report(scores))
            if mean >= best:
                best = mean
                write_checkpoint(candidate, tokenizer, out)
            if state_path is not None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"rng": rng.getstate(), "best": best, "step": step}
                state["tokenizer"] = tokenizer.to_str()
                torch.save(state, state_path)


def main() -> None:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=recipe.num_steps)
    parser.add_argument("--state", type=Path, help="file to keep the state in and go on from")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    train(replace(recipe, num_steps=arguments.steps), arguments.out, arguments.state)


if __name__ == "__main__":
    main()
