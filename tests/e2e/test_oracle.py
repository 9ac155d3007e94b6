"""What the daemon says of the bundled model, over HTTP and two ranks, against `transformers`."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon, events
from tests.e2e.conftest import MAX_NUM_BATCHED_TOKENS as B

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(bundled_checkpoint()), dtype=torch.float32
    )
    yield model.eval()


def logprobs_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] float32: at each position, the distribution of the next token."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(input_ids=torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(20, 500) for _ in range(length)]


@pytest.mark.parametrize("rank", [0, 1])
def test_greedy_tokens_and_logprobs(daemon: Daemon, oracle: Any, rank: int) -> None:
    for seed in range(10):
        prompt = prompt_of(3 + 7 * seed, seed + 100 * rank)
        choice = daemon.complete(prompt, 12, rank, logprobs=5)["choices"][0]
        tokens = choice["token_ids"]
        expected = logprobs_of(oracle, prompt + tokens)[len(prompt) - 1 : -1]
        chosen = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=TOLERANCE)
        # Greedy, up to ties that rounding may break either way.
        best = expected.max(dim=-1).values.tolist()
        assert chosen == pytest.approx(best, abs=TOLERANCE)
        assert tokens[0] == int(expected[0].argmax())
        for top, row in zip(choice["logprobs"]["top_logprobs"], expected, strict=True):
            fifth = float(row.topk(5).values[-1])
            assert min(top.values()) >= fifth - TOLERANCE


def test_prompt_logprobs_when_the_prompt_takes_several_steps(daemon: Daemon, oracle: Any) -> None:
    prompt = prompt_of(3 * B + 1, 7)
    choice = daemon.complete(prompt, 1, echo=True, logprobs=1)["choices"][0]
    given = choice["logprobs"]["token_logprobs"]
    assert given[0] is None and len(given) == len(prompt) + 1
    expected = logprobs_of(oracle, prompt)
    wanted = [float(expected[i, token]) for i, token in enumerate(prompt[1:])]
    assert given[1:-1] == pytest.approx(wanted, abs=TOLERANCE)


def test_a_prompt_of_many_steps_streams_no_empty_pieces(daemon: Daemon) -> None:
    body = {
        "messages": [{"role": "user", "content": "12 + 30 " * 150}],
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{daemon.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        received = list(events(response))
    usage = received[-2]["usage"]
    assert usage["prompt_tokens"] > 5 * B and usage["completion_tokens"] == 3
    deltas = [choice["delta"] for event in received[:-1] for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len(deltas) <= 1 + 3 + 1
    assert not any(delta.get("content") == "" for delta in deltas[1:])


def test_sampling_depends_on_the_seed_alone(daemon: Daemon) -> None:
    def sample(rank: int, seed: int) -> list[int]:
        body = {"temperature": 1.0, "seed": seed, "top_p": 0.95}
        ids: list[int] = daemon.complete([65, 66, 67], 20, rank, **body)["choices"][0]["token_ids"]
        return ids

    first = sample(0, 11)
    assert sample(1, 11) == first and sample(0, 11) == first
    assert any(sample(0, seed) != first for seed in (12, 13, 14))
