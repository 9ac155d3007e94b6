"""Bodies of both completion routes with anything in any place, and bytes that are no JSON: never a
server error, and afterwards every rank answers and nothing is open.
"""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.http.anything import WILD_VALUES, nested, places, replaced, same_every_time
from tests.server.http.served import Served
from tests.server.http.test_daemon_routes import samples

SAMPLING: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [5, 6],
    "bad_words": ["hello"],
    "seed": 1,
    "n": 2,
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 9,
    "return_token_ids": True,
    "stream": False,
    "stream_options": None,
    "priority": 1,
    "request_id": "abc",
    "user": "u",
    "structured_outputs": None,
    "prompt_logprobs": 1,
}
COMPLETION = {**SAMPLING, "prompt": ["a", "b"], "echo": True, "logprobs": 1}
CHAT = {
    **SAMPLING,
    "messages": [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "t", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "reasoning_effort": "low",
    "include_reasoning": True,
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": False,
    "add_generation_prompt": True,
}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
JSON = {"Content-Type": "application/json"}


def post(served: Served, path: str, content: bytes) -> httpx.Response:
    return served.http.post(path, content=content, headers=JSON)


def check(served: Served, path: str, content: bytes) -> None:
    answer = post(served, path, content)
    assert answer.status_code < 500, (content[:500], answer.text)
    if answer.status_code != 200:
        assert len(answer.content) < 4096
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def check_at_rest(served: Served) -> None:
    """Every rank answers, and no gauge tells of anything that is left."""
    for rank in range(len(served.engines)):
        headers = {"X-data-parallel-rank": str(rank)}
        body = {"prompt": [65], "max_tokens": 1}
        assert served.post("/v1/completions", body, headers=headers).status_code == 200
    served.wait(lambda: served.num_running == 0 and served.state.engine.num_open == 0)
    names = ("moed:num_requests_running", "moed:num_requests_waiting", "moed:kv_cache_usage_perc")
    served.wait(lambda: not any(v for key, v in samples(served).items() if key[0] in names))


def fuzz(served: Served, path: str, num_examples: int) -> None:
    body = PATHS[path]
    everywhere = list(places(body))

    @same_every_time(num_examples)
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        fuzzed = body
        for _ in range(data.draw(st.integers(1, 3))):
            fuzzed = place_anything(fuzzed, everywhere, data)
        check(served, path, json.dumps(fuzzed).encode())

    one()


def place_anything(body: Any, everywhere: list[tuple[Any, ...]], data: st.DataObject) -> Any:
    place = data.draw(st.sampled_from(everywhere))
    try:
        return replaced(body, place, data.draw(WILD_VALUES))
    except (KeyError, IndexError, TypeError):
        return body  # an earlier value has taken the place away


@pytest.mark.parametrize("path", PATHS)
def test_anything_anywhere(served: Served, path: str) -> None:
    answer = post(served, path, json.dumps(PATHS[path]).encode())
    assert answer.status_code == 200, answer.text
    fuzz(served, path, 150)
    check_at_rest(served)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_anything_anywhere_for_long(served: Served, path: str) -> None:
    fuzz(served, path, 5000)
    check_at_rest(served)


@pytest.mark.parametrize("path", PATHS)
def test_bytes_that_are_no_body(served: Served, path: str) -> None:
    whole = json.dumps(PATHS[path]).encode()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, len(whole)))
        check(served, path, whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:])

    one()
    check_at_rest(served)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [50, 240, 800])
def test_deep_values_anywhere(served: Served, path: str, depth: int) -> None:
    body = PATHS[path]
    for place in places(body):
        check(served, path, json.dumps(replaced(body, place, nested(depth))).encode())
    check_at_rest(served)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 500_000, b'"' + b"\xff" * 1000 + b'"', b"\0", b""],
)
def test_shapes_that_stop_parsers(served: Served, path: str, content: bytes) -> None:
    check(served, path, content)
