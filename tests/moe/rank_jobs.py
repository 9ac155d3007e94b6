"""What the ranks of a pool run; apart from the tests, so that no rank imports the oracle."""

from collections.abc import Sequence
from pathlib import Path

from moed.dist.groups import Groups
from tests.moe.harness import Stepper, engine_config, load


def generate(
    groups: Groups, folder: str, backend: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[int]:
    """The greedy tokens of this rank's prompt; a rank with an empty one takes part without work."""
    config = engine_config(Path(folder), backend=backend, ranks=groups.world_size)
    stepper = Stepper(config, load(config, groups), groups.rank)
    own = list(prompts[groups.rank])
    tokens: list[int] = []
    pieces, sizes = ({"a": own} if own else {}), [len(prompt) for prompt in prompts]
    for _ in range(num_tokens):
        logits = stepper.step(pieces, sizes)
        if own:
            tokens.append(int(logits["a"][-1].argmax()))
            pieces = {"a": tokens[-1:]}
        sizes = [min(1, len(prompt)) for prompt in prompts]
    return tokens
