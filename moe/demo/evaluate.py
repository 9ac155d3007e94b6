"""Measures how often the demo model's greedy answers are exactly right, skill by skill.

`python -m moed.moe.demo.evaluate --checkpoint DIR` loads the checkpoint with transformers, as any
other program would, and reports. Sums and differences are asked only on held-out pairs.
"""

import argparse
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moed.moe.demo import corpus
from moed.moe.demo.chat import Encoder
from moed.moe.demo.corpus import Dialogue, Turn

logger = logging.getLogger(__name__)

# ids [B, S] of rows padded at the right, to logits [B, S, vocabulary] under a causal mask
Logits = Callable[[Tensor], Tensor]


@dataclass
class Score:
    """How many answers were asked for and right, and the closest of the right decisions."""

    asked: int = 0
    right: int = 0
    # the smallest lead of a chosen token over the next best one, in logits
    smallest_margin: float = float("inf")

    @property
    def accuracy(self) -> float:
        return self.right / self.asked


def held_out_turn(rng: Random, op: str) -> Turn:
    return (corpus.sum_turn if op == "+" else corpus.difference_turn)(rng, held_out=True)


def examination(rng: Random, num_questions: int) -> list[Dialogue]:
    """`num_questions` dialogues for every skill; none of their measured sums was trained on."""
    dialogues = []
    for skill, (ask, _) in corpus.SKILLS.items():
        for _ in range(num_questions):
            dialogue = Dialogue()
            corpus.add_system(rng, dialogue, 0.25)
            if skill in ("sum", "difference"):
                dialogue.add(held_out_turn(rng, "+" if skill == "sum" else "-"))
            else:
                dialogue.add(ask(rng))
            dialogues.append(dialogue)
    for _ in range(num_questions):
        dialogues.append(corpus.tool_dialogue(rng))
        dialogues.append(Dialogue())
        corpus.add_name_recall(rng, dialogues[-1])
        dialogues.append(Dialogue())
        for _ in range(rng.randint(1, 8)):
            dialogues[-1].add(corpus.any_turn(rng))
        late = held_out_turn(rng, rng.choice("+-"))
        dialogues[-1].add(Turn("late arithmetic", late.question, late.answer))
        plain = held_out_turn(rng, rng.choice("+-"))
        question = plain.question + rng.choice(corpus.JSON_SUFFIXES)
        dialogues.append(Dialogue())
        dialogues[-1].add(Turn("json arithmetic", question, corpus.as_json_answer(plain.answer)))
    return dialogues


@torch.no_grad()
def measure(
    logits: Logits, encoder: Encoder, dialogues: Iterable[Dialogue], rows: int = 32
) -> dict[str, Score]:
    """Scores by skill.

    The right answer is known, so one forward pass replaces decoding: greedy decoding says exactly
    this answer if and only if every token of it is the most likely one after those before it.
    """
    scores: dict[str, Score] = defaultdict(Score)
    encoded = [(*encoder.encode(dialogue), dialogue.skills) for dialogue in dialogues]
    encoded.sort(key=lambda item: len(item[0]))
    for start in range(0, len(encoded), rows):
        part = encoded[start : start + rows]
        longest = len(part[-1][0])
        batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in part])
        best, choices = logits(batch).topk(2, dim=-1)
        margins = (best[..., 0] - best[..., 1]).tolist()
        chosen = choices[..., 0].tolist()
        for row, (ids, answer_lengths, skills) in enumerate(part):
            for skill, (first, end) in zip(skills, answer_spans(answer_lengths), strict=True):
                score = scores[skill]
                score.asked += 1
                if chosen[row][first - 1 : end - 1] == ids[first:end]:
                    score.right += 1
                    margin = min(margins[row][first - 1 : end - 1])
                    score.smallest_margin = min(score.smallest_margin, margin)
    return dict(scores)


def answer_spans(answer_lengths: list[int]) -> list[tuple[int, int]]:
    """First and one past the last position of each run of answer tokens."""
    padded = [False, *(length > 0 for length in answer_lengths), False]
    edges = [i for i in range(len(padded) - 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def report(scores: dict[str, Score]) -> str:
    lines = [
        f"{skill:16} {score.accuracy:7.2%} of {score.asked:5}, margin {score.smallest_margin:.2f}"
        for skill, score in scores.items()
    ]
    return "\n".join(sorted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "checkpoint"
    parser.add_argument("--checkpoint", type=Path, default=default, help="folder to load")
    parser.add_argument("--questions", type=int, default=1000, help="how many for each skill")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(arguments.checkpoint)
    encoder = Encoder(Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json")))
    dialogues = examination(Random(2024), arguments.questions)
    scores = measure(lambda ids: model(ids, use_cache=False).logits, encoder, dialogues)
    logger.info("%s", report(scores))


if __name__ == "__main__":
    main()
