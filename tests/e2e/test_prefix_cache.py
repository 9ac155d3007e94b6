"""What prompts have in common is computed once, and answers stay what they were."""

from typing import Any

import httpx
import pytest

from tests.daemon import Daemon, events

BLOCK = 16
TOLERANCE = 1e-4
# 100 bytes are 100 tokens for the bundled model: six full blocks of 16.
PROMPT = [65 + (7 * index) % 50 for index in range(100)]


def cached(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def computed(daemon: Daemon) -> float:
    samples = daemon.metrics()
    return sum(samples["moed:prompt_tokens_total", rank] for rank in range(2))


def forget(daemon: Daemon) -> None:
    response = httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=10)
    assert response.status_code == 200


def test_second_request_computes_what_is_new_wherever_it_comes_in(daemon: Daemon) -> None:
    forget(daemon)
    first = daemon.complete(PROMPT, 8)
    second = daemon.complete(PROMPT, 8)
    assert (cached(first), cached(second)) == (0, 96)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    other = daemon.complete(PROMPT, 8, cache_salt="mine")
    assert cached(other) == 0
    assert other["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_one_prompt_compute_it_once(daemon: Daemon, stream: bool) -> None:
    forget(daemon)
    before = computed(daemon)
    body = {"prompt": PROMPT, "n": 8, "max_tokens": 6, "temperature": 1, "seed": 3}
    response = daemon.post("/v1/completions", {**body, "stream": stream, "ignore_eos": True})
    assert response.status_code == 200
    # The first in full; the others what follows their last full block.
    assert computed(daemon) - before == 100 + 7 * 4


def said(choice: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a completion's or a chat's choice."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return choice["token_ids"], [entry["logprob"] for entry in logprobs["content"]]
    return choice["token_ids"], logprobs["token_logprobs"]


def assert_same(found: Any, cold: Any) -> None:
    (tokens, logprobs), (cold_tokens, cold_logprobs) = (
        said(a["choices"][0]) for a in (found, cold)
    )
    assert tokens == cold_tokens
    assert logprobs == pytest.approx(cold_logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_hit_says_what_a_miss_says(daemon: Daemon, length: int) -> None:
    """The last token is computed again also where full blocks hold it."""
    forget(daemon)
    prompt = PROMPT[:length]
    answers = [daemon.complete(prompt, 8, 0, logprobs=0) for _ in range(2)]
    cold = daemon.complete(prompt, 8, 0, logprobs=0, cache_salt=f"alone {length}")
    assert [cached(answer) for answer in (*answers, cold)] == [
        0,
        (length - 1) // BLOCK * BLOCK,
        0,
    ]
    for answer in answers:
        assert_same(answer, cold)
    for tail in ([1], [2] * 7, [3] * 50):
        warm = daemon.complete([*prompt, *tail], 8, 0, logprobs=0)
        alone = daemon.complete([*prompt, *tail], 8, 0, logprobs=0, cache_salt=f"{length} {tail}")
        assert cached(alone) == 0 and cached(warm) == length // BLOCK * BLOCK
        assert_same(warm, alone)


@pytest.mark.parametrize("stream", [False, True])
def test_a_growing_chat_says_what_it_says_cold(daemon: Daemon, stream: bool) -> None:
    """Each turn finds the one before it, prompt and answer, and computes what is new."""
    forget(daemon)
    messages: list[dict[str, str]] = []
    before = 0
    for turn, question in enumerate(
        ("12 + 30", "and 7 more?", "what was the first sum?", "20 + 3")
    ):
        messages.append({"role": "user", "content": question})
        body = {
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        warm = daemon.post("/v1/chat/completions", body, 0).json()
        cold = daemon.post("/v1/chat/completions", {**body, "cache_salt": f"{stream}{turn}"}, 0)
        assert_same(warm, cold.json())
        assert cached(cold.json()) == 0
        # What the answer before has written differs from its rendering at most in its end.
        assert cached(warm) % BLOCK == 0 and cached(warm) >= before // BLOCK * BLOCK
        assert turn == 0 or cached(warm) > 0
        before = warm["usage"]["prompt_tokens"]
        text = warm["choices"][0]["message"]["content"]
        if stream:
            streamed = daemon.post("/v1/chat/completions", {**body, "stream": True}, 0)
            deltas = [e["choices"][0]["delta"] for e in events(streamed) if e != "[DONE]"]
            assert "".join(delta.get("content", "") for delta in deltas) == text
        messages.append({"role": "assistant", "content": text})


def test_metrics_tell_the_hits(daemon: Daemon) -> None:
    forget(daemon)
    before = daemon.metrics()
    daemon.complete(PROMPT, 1, rank=1)
    daemon.complete(PROMPT, 1, rank=1)
    after = daemon.metrics()

    def more(name: str) -> float:
        return after[f"moed:{name}_total", 1] - before[f"moed:{name}_total", 1]

    assert more("prefix_cache_queries") == 200 and more("prefix_cache_hits") == 96


def test_forgotten_prefixes_are_computed_again(daemon: Daemon) -> None:
    daemon.complete(PROMPT, 1)
    forget(daemon)
    assert cached(daemon.complete(PROMPT, 1)) == 0


def test_switched_off_everything_is_computed() -> None:
    with Daemon("--no-enable-prefix-caching", ranks=1) as daemon:
        daemon.wait_ready()
        tokens = [daemon.complete(PROMPT, 4) for _ in range(2)]
        assert [cached(answer) for answer in tokens] == [0, 0]
        assert tokens[0]["choices"][0]["token_ids"] == tokens[1]["choices"][0]["token_ids"]
