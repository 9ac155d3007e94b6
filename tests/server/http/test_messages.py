"""Anthropic's protocol: the `anthropic` client, and bodies that it would not send."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from moed.server.messages import AddRequest
from tests.server.http.checkpoints import END, START
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served
from tests.server.http.test_tools import HERMES, checkpoint_of, says, serve

PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "d", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINKS = "<think>\nhm\n</think>\n\nI look. " + CALL


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(checkpoint_of(tmp_path_factory.mktemp("hermes"), HERMES, ())) as served:
        yield served


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=served.url, max_retries=0, timeout=20, **{"api_key": "none", **options}
    )


def prompt_of(served: Served, request: AddRequest) -> str:
    return served.state.tools.tokenizer.decode(request.prompt_token_ids, False)


def ask(served: Served, **body: Any) -> Any:
    return served.post(PATH, {"messages": USER, "max_tokens": 50, **body})


def test_a_message_is_answered_and_counted(served: Served) -> None:
    says(served, "hello world")
    with client_of(served) as client:
        answer = client.messages.create(model="tiny", max_tokens=50, messages=USER, system="be")
        counted = client.messages.count_tokens(model="tiny", messages=USER, system="be")
    assert [block.to_dict() for block in answer.content] == [
        {"type": "text", "text": "hello world"}
    ]
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "end_turn")
    assert answer.id.startswith("msg_")
    prompt = f"{START}system\nbe{END}\n{START}user\nhi{END}\n{START}assistant\n"
    assert prompt_of(served, served.last_request) == prompt
    num_prompt = len(served.last_request.prompt_token_ids)
    assert counted.input_tokens == num_prompt
    usage = answer.usage
    # The fake engines say that three tokens came from the cache: those are counted apart.
    assert usage.cache_read_input_tokens == 3 and usage.input_tokens == num_prompt - 3


@pytest.mark.parametrize(
    ("body", "text", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "he", "max_tokens", None),
        ({"stop_sequences": ["x", "lo"]}, "hel", "stop_sequence", "lo"),
    ],
)
def test_why_it_stopped(
    served: Served, body: Any, text: str, reason: str, sequence: str | None
) -> None:
    tokenizer = served.state.tools.tokenizer
    ids = [tokenizer.encode(letter, False)[0] for letter in "hello"]
    for engine in served.engines:
        engine.script = lambda request: ids
    answer = ask(served, **body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"] == [{"type": "text", "text": text}]


def test_more_than_the_context_is_cut_and_said(served: Served) -> None:
    for engine in served.engines:
        engine.script = lambda request: [65] * request.params.max_tokens
    answer = ask(served, max_tokens=32_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_input + usage["output_tokens"] == 512


def test_thoughts_text_and_calls_whole_and_streamed(hermes: Served) -> None:
    says(hermes, THINKS)
    with client_of(hermes) as client:
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 200,
            "messages": USER,
            "tools": TOOLS,
        }
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = (block.to_dict() for block in whole.content)
    assert str(thinking["thinking"]).strip() == "hm" and str(text["text"]).strip() == "I look."
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert whole.usage == final.usage

    def without_ids(message: Any) -> list[Any]:
        return [{**block.to_dict(), "id": None} for block in message.content]

    assert without_ids(whole) == without_ids(final)


def test_events_come_in_order(hermes: Served) -> None:
    says(hermes, THINKS)
    body = {"messages": USER, "max_tokens": 200, "tools": TOOLS, "stream": True}
    names, events = [], []
    with hermes.http.stream("POST", PATH, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    shape = [(e["type"][14:], e["index"]) for e in events if e["type"].startswith("content_block")]
    opened = None
    for kind, index in shape:
        if kind == "start":
            assert opened is None
            opened = index
        assert index == opened
        if kind == "stop":
            opened = None
    assert opened is None
    assert [index for kind, index in shape if kind == "start"] == [0, 1, 2]


def test_history_reaches_the_template_as_a_chat(hermes: Served) -> None:
    history: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "P"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "sun"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    says(hermes, "ok")
    with hermes.seen_by_template() as seen:
        body = {"messages": history, "tools": TOOLS, "thinking": {"type": "disabled"}}
        assert ask(hermes, **body).status_code == 200
    function = {"name": "get_weather", "arguments": {"city": "P"}}
    assert seen["messages"] == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "get_weather", "content": "sun"},
        {"role": "user", "content": "and?"},
    ]
    (tool,) = seen["tools"]
    assert tool["function"]["parameters"] == TOOLS[0]["input_schema"]
    assert seen["options"]["enable_thinking"] is False


def test_the_answer_goes_on_where_the_client_began_it(served: Served) -> None:
    says(served, " world")
    history = [*USER, {"role": "assistant", "content": "hello"}]
    assert ask(served, messages=history).json()["content"][0]["text"] == " world"
    assert prompt_of(served, served.last_request).endswith(f"{START}assistant\nhello")


def test_arguments_that_are_no_object_are_not_lost(hermes: Served) -> None:
    says(hermes, CALL.replace('{"city": "Paris"}', '["Paris"]'))
    answer = ask(hermes, tools=TOOLS, max_tokens=200).json()
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    texts = [block for block in answer["content"] if block["type"] == "text"]
    shown = json.dumps(calls or texts)
    assert "Paris" in shown
    for call in calls:
        assert isinstance(call["input"], dict)


def part(kind: str, **more: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": kind, **more}]}]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": part("image", source={})}, "image"),
        ({"messages": part("text")}, "messages[0].content[0].text"),
        ({"messages": part("tool_result")}, "tool_use_id"),
        ({"messages": part("tool_result", tool_use_id="t", content=5)}, "content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "block 0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n is a parameter"),
        ({"top_k": "x"}, "top_k"),
    ],
)
def test_bad_bodies_are_refused_by_name(served: Served, body: Any, names: str) -> None:
    response = ask(served, **body)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert names in answer["error"]["message"]
    assert answer["request_id"] == response.headers["x-request-id"]


def test_a_call_without_its_result_cannot_be_answered(served: Served) -> None:
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    response = ask(served, messages=[*USER, {"role": "assistant", "content": [block]}])
    assert response.status_code == 400 and "tool_result" in response.json()["error"]["message"]


def test_every_error_has_the_protocols_shape(served: Served) -> None:
    with client_of(served) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="nope", max_tokens=5, messages=USER)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert served.get(PATH).json()["type"] == "error"
    assert served.post(PATH + "/nope", {}).json()["error"]["type"] == "not_found_error"
    broken = served.http.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and broken.json()["type"] == "error"
    large = served.post(PATH, {"messages": USER, "system": "x" * 1_000_001})
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
    # Others keep OpenAI's.
    assert set(served.get("/v1/nope").json()) == {"error"}


def test_unknown_fields_are_told(served: Served) -> None:
    says(served, "ok")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = ask(served, thinking=thinking, context_management={"edits": []})
    told = response.headers["x-moed-ignored-params"]
    assert "context_management" in told
    # This model does not reason.
    assert "thinking_token_budget has no effect" in response.json()["warnings"][1]


def test_a_failure_midway_is_an_error_event(served: Served) -> None:
    with client_of(served) as client, pytest.raises(anthropic.APIStatusError) as failed:
        for engine in served.engines:
            engine.step_s = 0.02
        with client.messages.stream(model="tiny", max_tokens=400, messages=USER) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    served.fail_all()
    assert "request_id" in str(failed.value) and "api_error" in str(failed.value)


def test_keys_come_in_either_header(checkpoint: pathlib.Path) -> None:
    says_ok: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": USER}
    with Served(frontend_config(checkpoint, api_keys=("secret",)), ready=False) as served:
        for engine in served.engines:
            engine.become_ready()
        served.wait(lambda: served.get("/readyz").status_code == 200)
        with client_of(served, api_key="secret") as client:
            assert client.messages.create(**says_ok).stop_reason == "max_tokens"
        with client_of(served, api_key=None, auth_token="secret") as client:
            assert client.messages.create(**says_ok).stop_reason == "max_tokens"
        for key, status in (("secret", 200), ("other", 401), ("", 401)):
            assert served.post(PATH, says_ok, headers={"x-api-key": key}).status_code == status
        with client_of(served, api_key="other") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client.messages.create(**says_ok)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
