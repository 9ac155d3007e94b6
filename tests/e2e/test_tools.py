"""Tool calls of the bundled model, through the `openai` client; jsonschema judges enforced ones."""

import json
from typing import Any

import jsonschema
import pytest

from moed.config.model import BUNDLED_NAME, bundled_checkpoint
from moed.server.chat_template import ChatTemplate
from moed.server.parsers.events import ToolArguments, ToolStart
from moed.server.parsers.output_parser import OutputParser, ParserOptions
from moed.server.parsers.registry import tool_format
from tests.daemon import Daemon

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
MINUTES = {
    "type": "object",
    "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["minutes"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": CITY, "set_timer": MINUTES}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_the_model_calls_and_reports(daemon: Daemon) -> None:
    with daemon.client() as client:
        first = client.chat.completions.create(
            model=BUNDLED_NAME, messages=WEATHER, tools=TOOLS[:1], max_tokens=80
        )
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        history: list[Any] = [
            *WEATHER,
            choice.message.model_dump(),
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": '{"temperature": 18, "condition": "sunny"}',
            },
        ]
        second = client.chat.completions.create(
            model=BUNDLED_NAME, messages=history, tools=TOOLS[:1], max_tokens=80
        )
    assert second.choices[0].message.content == "It is 18 degrees and sunny in Paris."
    assert second.choices[0].finish_reason == "stop"


def test_the_stream_rebuilds_the_whole_answer(daemon: Daemon) -> None:
    body: dict[str, Any] = {
        "model": BUNDLED_NAME,
        "messages": WEATHER,
        "tools": TOOLS[:1],
        "max_tokens": 80,
    }
    with daemon.client() as client:
        whole = client.chat.completions.create(**body).choices[0].message.tool_calls
        with client.chat.completions.stream(
            **body, stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
    assert whole is not None and whole[0].type == "function"
    assert final.choices[0].finish_reason == "tool_calls"
    streamed = final.choices[0].message.tool_calls
    assert streamed is not None
    assert streamed[0].function.name == whole[0].function.name
    assert streamed[0].function.arguments == whole[0].function.arguments
    assert final.usage is not None and final.usage.completion_tokens_details is not None
    assert final.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit_their_schemas(daemon: Daemon, rank: int, parallel: bool) -> None:
    """Whatever the question, and however wild the sampling."""
    body = {
        "messages": [{"role": "user", "content": "Spell cat"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "temperature": 1.3,
        "seed": 1,
        "n": 4,
        "max_tokens": 500,
    }
    answer = daemon.post("/v1/chat/completions", body, rank).json()
    for choice in answer["choices"]:
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "tool_calls"
        calls = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        assert len(calls) == 1 or parallel
        for call in calls:
            name = call["function"]["name"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert "tool_calls" in reasons


def test_a_strict_tool_is_called_within_its_schema(daemon: Daemon) -> None:
    """The model would say Paris; free text stays free."""
    city = {"enum": ["Rome", "Oslo"]}
    schema = {**CITY, "properties": {"city": city}}
    function = {"name": "get_weather", "parameters": schema, "strict": True}
    body: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 80,
    }
    called = daemon.post("/v1/chat/completions", {**body, "messages": WEATHER}).json()
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    spell = [{"role": "user", "content": "Spell cat"}]
    said = daemon.post("/v1/chat/completions", {**body, "messages": spell}).json()
    free = daemon.post("/v1/chat/completions", {"messages": spell, "max_tokens": 80}).json()
    assert said["choices"][0]["message"]["content"] == free["choices"][0]["message"]["content"]


def test_a_named_tool_is_called(daemon: Daemon) -> None:
    with daemon.client() as client:
        found = client.chat.completions.create(
            model=BUNDLED_NAME,
            messages=WEATHER,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "set_timer"}},
            parallel_tool_calls=False,
            max_tokens=100,
        )
    calls = found.choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function"
    assert calls[0].function.name == "set_timer"
    jsonschema.validate(json.loads(calls[0].function.arguments), MINUTES)


def test_a_schema_and_tools_together(daemon: Daemon) -> None:
    """The model may call; what it says otherwise follows the schema."""
    body: dict[str, Any] = {"tools": TOOLS[:1], "response_format": {"type": "json_object"}}
    called = daemon.post(
        "/v1/chat/completions", {**body, "messages": WEATHER, "max_tokens": 80}
    ).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    hello = [{"role": "user", "content": "Hello"}]
    said = daemon.post(
        "/v1/chat/completions", {**body, "messages": hello, "max_tokens": 300}
    ).json()["choices"][0]
    message = said["message"]
    if said["finish_reason"] == "stop":
        assert isinstance(json.loads(message["content"]), dict)
    else:
        assert said["finish_reason"] in ("tool_calls", "length")


def test_the_template_of_the_bundled_model_is_read_back() -> None:
    """A call that its own template writes is the call that the parser finds."""
    template = ChatTemplate.load(str(bundled_checkpoint()))
    assert template is not None
    form = tool_format("auto", template.source)
    assert form is not None and form.name == "hermes"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": '"</x>"'}}}
    text = template.render(
        [*WEATHER, {"role": "assistant", "content": "Yes.", "tool_calls": [call, call]}],
        TOOLS,
        add_generation_prompt=False,
        continue_final_message=False,
        options={},
    )
    said = text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    parser = OutputParser(ParserOptions(form, None))
    events = [*parser.feed(said), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolStart)] == ["f", "f"]
    texts = [event.text for event in events if isinstance(event, ToolArguments) and not event.index]
    assert json.loads("".join(texts)) == {"a": '"</x>"'}
