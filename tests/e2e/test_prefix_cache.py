"""What prompts have in common is computed once, and answers stay what they were."""

import httpx
import pytest

from tests.daemon import Daemon

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
