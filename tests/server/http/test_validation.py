"""Odd and hostile requests: 400 with the parameter's name, never 500, and the server lives on."""

import json
import pathlib
import socket
import time
from typing import Any

import pytest

from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def raw(served: Served, path: str, body: bytes, **headers: str) -> Any:
    return served.http.post(
        path, content=body, headers={"Content-Type": "application/json", **headers}
    )


def check(response: Any, status: int, param: str | None, code: str | None = None) -> Any:
    """An error in the envelope; returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers
    assert len(response.content) < 4096
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error
    assert error["code"] is None or isinstance(error["code"], str)
    if code is not None:
        assert error["code"] == code
    for ugly in ("pydantic", "Traceback", "body.", "Input should be", "[type="):
        assert ugly not in error["message"]
    return error


BAD = [
    ("temperature", -1),
    ("temperature", 2.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", "1"),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 2.5),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 1_000_000),
    ("n", True),
    ("n", "2"),
    ("n", 2.0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 2**63),
    ("max_tokens", 10**4000),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", "7"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", "x"]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ["x"] * 5000),
    ("stop", "x" * 500_000),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {}),
    ("stop_token_ids", [400]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**63]),
    ("stop_token_ids", [1] * 200),
    ("logit_bias", {"400": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", []),
    ("priority", 2**40),
    ("stream", "yes"),
    ("request_id", ""),
    ("request_id", "two words"),
    ("request_id", "a\r\nSet-Cookie: b"),
    ("user", 5),
    ("model", 5),
    ("stream_options", {"include_usage": True}),
    ("suffix", "x"),
    ("best_of", 2),
    ("use_beam_search", True),
    ("functions", [{}]),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:30])
def test_bad_value_is_named(served: Served, path: str, name: str, value: Any) -> None:
    base = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    error = check(served.post(path, {**base, name: value}), 400, name)
    assert name in error["message"]


NESTED = [
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", {"5": "1"}, "logit_bias.5"),
    ("stop_token_ids", [1, True], "stop_token_ids[1]"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag"),
]


@pytest.mark.parametrize(("name", "value", "param"), NESTED)
def test_bad_value_inside_another_is_named(
    served: Served, name: str, value: Any, param: str
) -> None:
    check(served.post(COMPLETIONS, {"prompt": "hi", name: value}), 400, param)


def test_a_stop_string_of_1_mb_is_refused(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint, max_request_bytes=4_000_000)) as served:
        body = {"prompt": "hi", "stop": "x" * 1_000_000}
        check(served.post(COMPLETIONS, body), 400, "stop")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_means_absent(served: Served, path: str) -> None:
    names = sorted({name for name, _ in BAD} - {"max_tokens"})
    base: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    body = {**base, **dict.fromkeys(names), "max_tokens": 1}
    response = served.post(path, body)
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "nan", "0x1", "01"])
def test_numbers_that_are_none(served: Served, literal: str) -> None:
    body = f'{{"prompt": "hi", "temperature": {literal}}}'.encode()
    error = check(raw(served, COMPLETIONS, body), 400, None, "invalid_json")
    assert "JSON" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"5",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 alone"}',
        b'{"prompt": "\\ud83dx"}',
        b'{"prompt": "hi"} extra',
        b'{"prompt": ' + b"[" * 10_000,
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"\x00\x01",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bodies_that_are_no_request(served: Served, body: bytes) -> None:
    response = raw(served, COMPLETIONS, body)
    assert response.status_code == 400
    check(response, 400, response.json()["error"]["param"])


@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800 and more"}'])
def test_half_of_a_surrogate_pair_is_named(served: Served, body: bytes) -> None:
    """Wherever it stands: near the end it is no body that was cut short."""
    error = check(raw(served, COMPLETIONS, body), 400, None, "invalid_json")
    assert "surrogate" in error["message"]
    cut = check(raw(served, COMPLETIONS, body[:9]), 400, None, "invalid_json")
    assert "truncated" in cut["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"json_schema": 5}, "json_schema"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_may_be_one_of_two_kinds(served: Served, given: Any, param: str) -> None:
    error = check(served.post(COMPLETIONS, {"prompt": "x", **given}), 400, param, "invalid_type")
    assert error["message"].startswith(f"{param} must be a string or an object, not ")


def test_deep_nesting_below_the_parsers_own_limit_is_no_fault(served: Served) -> None:
    deep = b'{"a":' * 800 + b"1" + b"}" * 800
    tool = b'{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}"
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "tools": [%s]}'
    response = raw(served, CHAT, body % tool)
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([999_999], "prompt"),
        ([400], "prompt"),
        ([-1], "prompt"),
        ([2**63], "prompt"),
        ([2**64 + 1], "prompt"),
        ([10**4000], "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([[], [1]], "prompt[0]"),
        ([True], "prompt"),
        ([1, True], "prompt"),
        ([1.0], "prompt"),
        ([None], "prompt"),
        ([[1], [-1]], "prompt[1]"),
        ([[1], "a"], "prompt"),
        (["a", 1], "prompt"),
        (["a", [1]], "prompt"),
        ([[[1]]], "prompt"),
        ("", "prompt"),
        ([""], "prompt"),
        (["a", ""], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_prompts(served: Served, prompt: Any, param: str) -> None:
    check(served.post(COMPLETIONS, {"prompt": prompt}), 400, param)


def test_missing_prompt(served: Served) -> None:
    error = check(served.post(COMPLETIONS, {}), 400, "prompt", "missing_required_parameter")
    assert error["message"] == "prompt is missing"


@pytest.mark.parametrize("prompt", [" ", "\n", "\u0000", "\u200b"])
def test_white_space_is_a_prompt(served: Served, prompt: str) -> None:
    assert served.complete(prompt=prompt, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([*USER, {"role": "user", "content": None}], "messages[1].content"),
        (
            [*USER, *USER, {"role": "tool", "content": [{"type": "image_url"}]}],
            "messages[2].content",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}],
            "messages[0].tool_calls[0].function",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_messages(served: Served, messages: Any, param: str) -> None:
    check(served.post(CHAT, {"messages": messages}), 400, param)


@pytest.mark.parametrize("content", ["", " ", []])
def test_message_with_empty_content_is_answered(served: Served, content: Any) -> None:
    answer = served.chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("tools", [[{}], [{"type": "function"}], {}, [{"type": "x"}]])
def test_bad_tools(served: Served, tools: Any) -> None:
    response = served.post(CHAT, {"messages": USER, "tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tools")


TOOL = {"type": "function", "function": {"name": "f"}}


SOME: dict[str, Any] = {"mode": "auto", "tools": [TOOL]}


@pytest.mark.parametrize(
    "choice", ["required", TOOL, {"type": "allowed_tools", "allowed_tools": SOME}], ids=str
)
def test_forced_tools_need_tools(served: Served, choice: Any) -> None:
    nothing: list[dict[str, Any]] = [{}, {"tools": None}, {"tools": []}]
    for tools in nothing:
        response = served.post(CHAT, {"messages": USER, "tool_choice": choice, **tools})
        assert "tools" in check(response, 400, "tool_choice", "invalid_value")["message"]


BAD_CHOICES: list[Any] = [
    *("any", 5, [], {}, {"type": "function"}, {"type": "function", "function": {}}),
    *({"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {**SOME, "mode": "x"}}),
    {"type": "allowed_tools", "allowed_tools": {**SOME, "tools": []}},
]


@pytest.mark.parametrize("choice", BAD_CHOICES, ids=str)
def test_bad_tool_choice(served: Served, choice: Any) -> None:
    response = served.post(CHAT, {"messages": USER, "tool_choice": choice, "tools": [TOOL]})
    assert "required" in check(response, 400, "tool_choice")["message"]


def test_named_tool_must_be_there(served: Served) -> None:
    named = {"type": "function", "function": {"name": "g" * 5000}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL, named]}}
    for choice in (named, some):
        response = served.post(CHAT, {"messages": USER, "tool_choice": choice, "tools": [TOOL]})
        assert "f" in check(response, 400, "tool_choice", "invalid_value")["message"]


def test_forced_tools_need_a_known_format(served: Served) -> None:
    """The template of this checkpoint shows none."""
    body = {"messages": USER, "tool_choice": "required", "tools": [TOOL]}
    error = check(served.post(CHAT, body), 400, "tool_choice", "unsupported_value")
    assert "--tool-call-parser" in error["message"]


def test_bounds_of_logprobs(served: Served) -> None:
    for value in (21, 1_000_000, -1, True, 1.5, 10**4000):
        check(served.post(COMPLETIONS, {"prompt": "a", "logprobs": value}), 400, "logprobs")
        body = {"messages": USER, "logprobs": True, "top_logprobs": value}
        check(served.post(CHAT, body), 400, "top_logprobs")
    check(served.post(CHAT, {"messages": USER, "top_logprobs": 2}), 400, "top_logprobs")
    check(served.post(CHAT, {"messages": USER, "logprobs": 1}), 400, "logprobs")
    assert served.complete(prompt="a", logprobs=20, max_tokens=1)["choices"][0]["logprobs"]


@pytest.mark.parametrize("values", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}])
def test_values_that_change_nothing_are_taken(served: Served, values: Any) -> None:
    assert "warnings" not in served.complete(prompt="a", max_tokens=1, **values)


def test_max_tokens_zero_needs_echo(served: Served) -> None:
    check(served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 0}), 400, "max_tokens")
    check(served.post(CHAT, {"messages": USER, "max_tokens": 0}), 400, "max_tokens")
    body = {"messages": USER, "max_completion_tokens": 0}
    check(served.post(CHAT, body), 400, "max_completion_tokens")


def test_min_tokens_above_max_tokens(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 3, "min_tokens": 4}
    check(served.post(COMPLETIONS, body), 400, "min_tokens")


L = 512


@pytest.mark.parametrize("max_tokens", [1, None])
def test_prompt_one_below_the_limit_gives_one_token(served: Served, max_tokens: int | None) -> None:
    answer = served.complete(prompt=[5] * (L - 1), max_tokens=max_tokens)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_tokens", [L, L + 1, 5 * L])
@pytest.mark.parametrize("max_tokens", [1, None, 100])
def test_prompt_at_the_limit_is_refused_with_the_numbers(
    served: Served, num_tokens: int, max_tokens: int | None
) -> None:
    body = {"prompt": [5] * num_tokens, "max_tokens": max_tokens}
    error = check(served.post(COMPLETIONS, body), 400, "prompt", "context_length_exceeded")
    assert str(L) in error["message"] and str(num_tokens) in error["message"]


@pytest.mark.parametrize("max_tokens", [100, 10**9])
def test_output_beyond_the_limit_is_refused_with_the_numbers(
    served: Served, max_tokens: int
) -> None:
    body = {"prompt": [5] * (L - 50), "max_tokens": max_tokens}
    error = check(served.post(COMPLETIONS, body), 400, "max_tokens", "context_length_exceeded")
    for number in (L, L - 50, max_tokens, 50):
        assert str(number) in error["message"]


def test_default_max_tokens_shrinks_to_what_is_left(served: Served) -> None:
    answer = served.complete(prompt=[5] * (L - 4))
    assert answer["usage"]["completion_tokens"] == 4


def test_one_bad_prompt_refuses_all(served: Served) -> None:
    before = len(served.arrivals)
    response = served.post(COMPLETIONS, {"prompt": ["ok", "word " * 2000]})
    check(response, 400, "prompt", "context_length_exceeded")
    check(served.post(COMPLETIONS, {"prompt": [[1], [400]]}), 400, "prompt[1]")
    assert len(served.arrivals) == before


def test_text_that_cannot_fit_is_refused_at_once(served: Served) -> None:
    start = time.monotonic()
    check(served.post(COMPLETIONS, {"prompt": "a " * 400_000}), 400, "prompt")
    assert time.monotonic() - start < 1


def test_more_choices_than_could_ever_wait_are_refused(served: Served) -> None:
    body = {"prompt": [[1]] * 100, "n": 128}
    check(served.post(COMPLETIONS, body), 400, "prompt")


def test_ten_thousand_messages(served: Served) -> None:
    response = served.post(CHAT, {"messages": USER * 10_000})
    check(response, 400, "messages", "context_length_exceeded")


# HTTP ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/v1", "/v1/completions/", "/v1/embeddings", "/v2/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_paths(served: Served, path: str, method: str) -> None:
    error = check(served.http.request(method, path), 404, None)
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "//v1//chat/completions/", CHAT),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/tiny", "/v1/models/tiny"),
        ("GET", "/metrics/", "/metrics"),
        ("GET", "/chat/completions", None),
        ("POST", "/v1/embeddings", None),
        ("GET", "/v1" * 1000, None),
        ("GET", "/", None),
    ],
)
def test_a_path_that_is_nearly_right_is_told(
    served: Served, method: str, path: str, meant: str | None
) -> None:
    error = check(served.http.request(method, f"{served.url}{path}"), 404, None)
    assert ("did you mean" in error["message"]) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("PUT", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/tiny", "GET"),
        ("POST", "/livez", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_wrong_methods(served: Served, method: str, path: str, allowed: str) -> None:
    response = served.http.request(method, path)
    check(response, 405, None, "method_not_allowed")
    assert allowed in response.headers["allow"]


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"]
)
def test_wrong_content_types(served: Served, media_type: str) -> None:
    response = served.http.post(
        COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": media_type}
    )
    check(response, 415, None)


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
def test_json_content_types(served: Served, media_type: str) -> None:
    response = served.http.post(
        COMPLETIONS,
        content=b'{"prompt": "a", "max_tokens": 1}',
        headers={"Content-Type": media_type},
    )
    assert response.status_code == 200, response.text


def test_content_type_may_be_absent(served: Served) -> None:
    response = served.http.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1}')
    assert response.status_code == 200, response.text


def test_body_above_the_limit(served: Served) -> None:
    most = served.config.server.max_request_bytes
    error = check(raw(served, COMPLETIONS, b"x" * (most + 1)), 413, None)
    assert str(most) in error["message"]

    def chunks() -> Any:
        for _ in range(most // 10_000 + 2):
            yield b"x" * 10_000

    response = served.http.post(
        COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"}
    )
    check(response, 413, None)


def talk(served: Served, request: bytes, timeout_s: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), timeout=timeout_s) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def test_announced_length_that_is_a_lie(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    huge = talk(served, head + b"Content-Length: 9999999999999\r\n\r\n{")
    assert b" 413 " in huge.splitlines()[0]
    # More announced than sent, and the client gone: nothing is left behind.
    talk(served, head + b'Content-Length: 500\r\n\r\n{"prompt": "a"}')
    # Less announced than sent: the rest is no request.
    short = talk(served, head + b'Content-Length: 5\r\n\r\n{"prompt": "a"}')
    assert b" 400 " in short.splitlines()[0]
    assert served.complete(prompt="a", max_tokens=1)["choices"]


def test_long_messages_stay_short(served: Served) -> None:
    for body in (
        {"prompt": "a", "temperature": "x" * 100_000},
        {"prompt": "a", "model": "é" * 100_000},
        {"prompt": "a", "y" * 100_000: 1, "temperature": 9},
    ):
        response = served.post(COMPLETIONS, body)
        check(response, response.status_code, response.json()["error"]["param"])
    long_name = served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "y" * 100_000: 1})
    assert long_name.status_code == 200
    assert len(long_name.headers["x-moed-ignored-params"]) <= 1000
    assert len(long_name.content) < 4096


def test_unforeseen_fault_is_one_sentence_and_logged(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.state.engine, "submit", fail)
    response = served.post(COMPLETIONS, {"prompt": "a"}, headers={"X-Request-Id": "abc"})
    error = check(response, 500, None, "internal_error")
    assert "secret" not in json.dumps(error) and "abc" in error["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * 1_100_000 + b"1]}",
        b'{"prompt": [' + b'"a",' * 1_100_000 + b'"a"]}',
        b'{"prompt": "a"' + b"".join(b',"%d":1' % i for i in range(1_100_000)) + b"}",
    ],
    ids=["tokens", "strings", "names"],
)
def test_millions_of_small_values_are_refused_before_they_are_read(
    checkpoint: pathlib.Path, body: bytes
) -> None:
    with Served(frontend_config(checkpoint, max_request_bytes=2**25)) as served:
        error = check(raw(served, COMPLETIONS, body), 413, None)
        assert "1000000 values" in error["message"]


def test_long_text_is_one_value_whatever_is_in_it(checkpoint: pathlib.Path) -> None:
    body = json.dumps({"prompt": 'a, \\",' * 500_000}).encode()
    with Served(frontend_config(checkpoint, max_request_bytes=2**25)) as served:
        error = check(raw(served, COMPLETIONS, body), 400, "prompt")
        assert "maximum context length" in error["message"]


def test_first_bad_entry_of_many_is_told_without_a_look_at_the_others(served: Served) -> None:
    body = {"messages": [{"role": "nobody"}] * 19_999}
    began_at = time.monotonic()
    check(served.post(CHAT, body), 400, "messages[0].role")
    assert time.monotonic() - began_at < 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"top_k": 2**31}, "at most 2147483647"),
        ({"seed": 2**63}, "at most 9223372036854775807"),
        ({"request_id": "a b"}, "printable ASCII"),
        ({"request_id": ""}, "printable ASCII"),
        ({"request_id": "x" * 201}, "200 characters"),
    ],
)
def test_bounds_are_told_in_full_and_in_words(
    served: Served, body: dict[str, Any], words: str
) -> None:
    error = check(served.post(COMPLETIONS, {"prompt": "a", **body}), 400, next(iter(body)))
    assert words in error["message"]


def test_list_with_a_prompt_that_is_too_long_names_it(served: Served) -> None:
    most = served.state.context_length
    check(served.post(COMPLETIONS, {"prompt": [[1], [1] * most]}), 400, "prompt[1]")
