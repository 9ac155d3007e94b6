"""What an answer says that it cost is the same streamed and in one piece, whatever is mixed."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.daemon import Daemon
from tests.e2e.conftest import MAX_NUM_BATCHED_TOKENS as B

PATHS = ("/v1/completions", "/v1/chat/completions")
# More than a step takes, and the same beginning for all: later ones hit the prefix cache.
LONG = "12 + 30 " * (B // 2)
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
MIXES = [
    {"n": n, "prompt": prompt, "stop": stop, "logprobs": logprobs, "temperature": temperature}
    for n, prompt, stop, logprobs, temperature in itertools.product(
        (1, 8), ("12 + 30", LONG), (None, ["2"], ["4", " 1"]), (False, True), (0.0, 1.0)
    )
]


def asked(path: str, mix: dict[str, Any]) -> dict[str, Any]:
    body = {**mix, "max_tokens": 12, "seed": 5}
    prompt, logprobs = body.pop("prompt"), body.pop("logprobs")
    if path == "/v1/completions":
        return {**body, "prompt": [prompt, "7"], **({"logprobs": 2} if logprobs else {})}
    body["messages"] = [{"role": "user", "content": prompt}]
    return {**body, **({"logprobs": True, "top_logprobs": 2} if logprobs else {})}


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def choices_of_stream(events: list[Any], num_choices: int) -> list[Any]:
    """(text, tokens with logprobs, reasons to end) by index."""
    found: list[Any] = [("", [], []) for _ in range(num_choices)]
    for choice in (choice for event in events for choice in event["choices"]):
        text, tokens, reasons = found[choice["index"]]
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        found[choice["index"]] = (text, tokens + tokens_of(choice), reasons)
    return found


def tokens_of(choice: Any) -> list[str]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    return list(logprobs.get("tokens", ()))


def choice_of_whole(choice: Any) -> Any:
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return (text, tokens_of(choice), [choice["finish_reason"]])


@pytest.mark.parametrize("path", PATHS)
def test_streams_say_what_whole_answers_say(daemon: Daemon, path: str) -> None:
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        for mix in MIXES:
            body = asked(path, mix)
            whole = client.post(path, json=body).json()
            plain = list(streamed(client, path, body))
            usage = {"stream_options": {"include_usage": True}}
            *events, last = streamed(client, path, {**body, **usage})
            assert last["choices"] == [], mix
            assert [last["usage"][key] for key in COUNTS] == [whole["usage"][key] for key in COUNTS]
            assert all(event["usage"] is None and event["choices"] for event in events)
            assert all("usage" not in event and event["choices"] for event in plain)
            expected = [choice_of_whole(choice) for choice in whole["choices"]]
            assert choices_of_stream(events, len(expected)) == expected, mix
            assert choices_of_stream(plain, len(expected)) == expected, mix


def test_a_prefix_hit_is_told_alike(daemon: Daemon) -> None:
    body = {"prompt": LONG + "again", "max_tokens": 2, "temperature": 0}
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        client.headers["X-data-parallel-rank"] = "0"
        first = client.post(PATHS[0], json=body).json()["usage"]
        whole = client.post(PATHS[0], json=body).json()["usage"]
        usage = {"stream_options": {"include_usage": True}}
        *_, last = streamed(client, PATHS[0], {**body, **usage})
    assert whole == last["usage"]
    assert whole["prompt_tokens_details"]["cached_tokens"] > B
    assert [first[key] for key in COUNTS] == [whole[key] for key in COUNTS]


def test_preemption_changes_no_count_and_no_token() -> None:
    """So few KV blocks that four requests push each other out; two begin alike."""
    beginning = [65] * 32
    prompts = [[*beginning, 70 + index] if index < 2 else [90 + index] * 33 for index in range(4)]
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": 100,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": str(index),
        }
        for index, prompt in enumerate(prompts)
    ]
    with Daemon("--num-kv-blocks", "14", "--max-model-len", "200", ranks=1) as daemon:
        daemon.wait_ready()
        client = httpx.Client(base_url=daemon.url, timeout=60)
        with client, ThreadPoolExecutor(4) as pool:
            alone = [client.post(PATHS[0], json=body).json() for body in bodies]
            httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=10).raise_for_status()
            together = list(pool.map(lambda b: client.post(PATHS[0], json=b).json(), bodies))
            num_preempted = daemon.metrics()["moed:num_preemptions_total", 0]
            assert num_preempted > 0
            httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=10).raise_for_status()
            usage = {"stream_options": {"include_usage": True}}
            ends = pool.map(lambda b: list(streamed(client, PATHS[0], {**b, **usage}))[-1], bodies)
            told = [end["usage"] for end in ends]
            assert daemon.metrics()["moed:num_preemptions_total", 0] > num_preempted
        metrics = daemon.metrics()
        daemon.assert_alive()
    for one, other in zip(alone, together, strict=True):
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
    expected = {"prompt_tokens": 33, "completion_tokens": 100, "total_tokens": 133}
    for found in [answer["usage"] for answer in (*alone, *together)] + told:
        assert {key: found[key] for key in COUNTS} == expected
        # What a request finds again of its own is no hit.
        assert found["prompt_tokens_details"]["cached_tokens"] == 0
    assert metrics["moed:prompt_tokens_total", 0] == 12 * 33
    assert metrics["moed:generation_tokens_total", 0] == 12 * 100
