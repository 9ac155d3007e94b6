"""`/v1/responses` through the `openai` client, and bodies that it would not send."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moed.server.api.errors import NotFound
from moed.server.api.responses_api.store import ResponseStore, Stored
from moed.server.messages import AddRequest
from tests.server.http.checkpoints import END, START
from tests.server.http.served import Served
from tests.server.http.test_messages import THINKS
from tests.server.http.test_tools import HERMES, checkpoint_of, says, serve

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(checkpoint_of(tmp_path_factory.mktemp("hermes"), HERMES, ())) as served:
        yield served


def prompt_of(served: Served, request: AddRequest) -> str:
    return served.state.tools.tokenizer.decode(request.prompt_token_ids, False)


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"


def events_of(served: Served, **body: Any) -> tuple[list[str], list[Any]]:
    """The names of the lines before, and the events."""
    names, events = [], []
    body = {"input": "hi", **body, "stream": True}
    with served.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    return names, events


def test_input_is_answered_and_counted(served: Served) -> None:
    says(served, "hello world")
    with served.client() as client:
        answer = client.responses.create(model="tiny", input="hi", instructions="be")
        counted = client.responses.input_tokens.count(model="tiny", input="hi", instructions="be")
    assert answer.output_text == "hello world" and answer.status == "completed"
    assert answer.id.startswith("resp_") and answer.model == "tiny"
    prompt = turn("system", "be") + turn("user", "hi") + f"{START}assistant\n"
    assert prompt_of(served, served.last_request) == prompt
    num_prompt = len(served.last_request.prompt_token_ids)
    assert answer.usage is not None and answer.usage.input_tokens == num_prompt
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == num_prompt + answer.usage.output_tokens
    assert counted.input_tokens == num_prompt


def test_too_few_tokens_make_it_incomplete(served: Served) -> None:
    for engine in served.engines:
        engine.script = lambda request: [65] * request.params.max_tokens
    for is_streamed in (False, True):
        body = {"input": "hi", "max_output_tokens": 4}
        if is_streamed:
            _, events = events_of(served, **body)
            assert events[-1]["type"] == "response.incomplete"
            assert events[-2]["item"]["status"] == "incomplete"
            answer = events[-1]["response"]
        else:
            answer = served.post(PATH, body).json()
        assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["usage"]["output_tokens"] == 4


def test_a_conversation_goes_on_from_a_stored_answer(served: Served) -> None:
    says(served, "one")
    with served.client() as client:
        first = client.responses.create(model="tiny", input="a", instructions="only now")
        says(served, "two")
        second = client.responses.create(model="tiny", input="b", previous_response_id=first.id)
        third = client.responses.create(
            model="tiny",
            input="c",
            previous_response_id=second.id,
            extra_body={"stream": False},
            store=False,
        )
        # Instructions are those of one request alone.
        turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
        said = "".join(turn(*t) for t in [*turns, ("user", "c")])
        assert prompt_of(served, served.last_request) == said + f"{START}assistant\n"
        assert third.previous_response_id == second.id
        assert client.responses.retrieve(first.id).output_text == "one"
        client.responses.delete(first.id)
        for response_id in (first.id, third.id, "resp_none"):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
            with pytest.raises(openai.NotFoundError) as missing:
                client.responses.create(model="tiny", input="d", previous_response_id=response_id)
            assert missing.value.code == "previous_response_not_found"
        # The second one still holds the first one's part.
        client.responses.create(model="tiny", input="c", previous_response_id=second.id)
        assert prompt_of(served, served.last_request).startswith(turn("user", "a"))
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(second.id)


def test_streamed_answers_are_stored_too(served: Served) -> None:
    says(served, "one")
    _, events = events_of(served)
    answer = events[-1]["response"]
    assert served.get(f"{PATH}/{answer['id']}").json() == answer


def test_reasoning_text_and_calls_whole_and_streamed(hermes: Served) -> None:
    says(hermes, THINKS)
    with hermes.client() as client:
        whole = client.responses.create(model="tiny", input="hi", tools=TOOLS)
        with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = whole.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text.strip() == "hm"
    assert message.type == "message" and whole.output_text.strip() == "I look."
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0

    def plain(response: Any) -> list[Any]:
        ids = {"id", "call_id", "parsed_arguments"}
        found = [{k: v for k, v in item.to_dict().items() if k not in ids} for item in response]
        for item in found:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return found

    assert plain(whole.output) == plain(final.output)


def test_events_come_in_order(hermes: Served) -> None:
    says(hermes, THINKS)
    names, events = events_of(hermes, tools=TOOLS)
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    short = [name.removeprefix("response.") for name in names]
    assert short[:2] == ["created", "in_progress"] and short[-1] == "completed"
    without_repeats = [n for i, n in enumerate(short) if n != short[i - 1]]
    assert without_repeats[2:-1] == [
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
    ]
    items = {e["output_index"]: e["item"] for e in events if e["type"].endswith("item.done")}
    assert [items[index] for index in sorted(items)] == events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]


def test_only_what_was_being_written_is_incomplete(hermes: Served) -> None:
    text = "<think>hm</think>x"
    says(hermes, text)
    num_tokens = len(hermes.state.tools.tokenizer.encode(text, False))
    _, events = events_of(hermes, max_output_tokens=num_tokens)
    # The last token ends the reasoning and begins the text, at which the answer is cut.
    done = [e["item"] for e in events if e["type"].endswith("item.done")]
    assert [(item["type"], item["status"]) for item in done] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]
    assert done == events[-1]["response"]["output"]


def test_history_reaches_the_template_as_a_chat(hermes: Served) -> None:
    call = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "P"}'}
    items: list[Any] = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "assistant", "content": "Sun,"},
        {"role": "assistant", "content": "and rain."},
        {"role": "user", "content": "b"},
    ]
    says(hermes, "ok")
    with hermes.seen_by_template() as seen:
        body = {"input": items, "tools": TOOLS, "reasoning": {"effort": "high"}}
        assert hermes.post(PATH, body).status_code == 200
    function = {"name": "get_weather", "arguments": {"city": "P"}}
    assert seen["messages"] == [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "name": "get_weather", "content": "rain"},
        {"role": "assistant", "content": "Sun,"},
        {"role": "assistant", "content": "and rain."},
        {"role": "user", "content": "b"},
    ]
    assert seen["tools"][0]["function"]["name"] == "get_weather"
    assert seen["options"]["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "item 0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "arguments"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice must be a string or an object, not 5"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "context"),
        ({"max_tokens": 5}, "max_tokens is a parameter"),
    ],
)
def test_bad_bodies_are_refused_by_name(served: Served, body: Any, names: str) -> None:
    response = served.post(PATH, {"input": "hi", **body})
    assert response.status_code == 400, response.text
    assert names in response.json()["error"]["message"]


def test_a_failure_midway_fails_the_response(served: Served) -> None:
    for engine in served.engines:
        engine.step_s = 0.02
    kinds = []
    with served.client() as client, pytest.raises(openai.APIError):
        with client.responses.stream(model="tiny", input="hi") as stream:
            for count, event in enumerate(stream):
                kinds.append(event.type)
                if count == 8:
                    served.fail_all()
    assert kinds[-1] == "response.failed" and "response.completed" not in kinds


def stored(size: int) -> Stored:
    return Stored(b"x" * (size - 2), b"[]")


def test_the_store_forgets_the_oldest() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put("me", name, stored(10))
    store.get("me", "a", None)  # used again, so b is the oldest
    store.put("me", "d", stored(10))
    with pytest.raises(NotFound):
        store.get("me", "b", None)
    assert store.get("me", "a", None).history == []
    store.put("me", "e", stored(85))  # room for 15 more
    assert len(store) == 2
    store.put("me", "f", stored(101))
    assert len(store) == 0
    store.put("me", "g", stored(100))
    store.delete("me", "g")
    store.put("me", "h", stored(100))
    assert len(store) == 1
