"""Anthropic's protocol with the bundled model, through the `anthropic` client."""

from typing import Any

import anthropic

from moed.config.model import BUNDLED_NAME
from tests.daemon import Daemon
from tests.e2e.test_tools import CITY, WEATHER

TOOLS: list[Any] = [{"name": "get_weather", "input_schema": CITY}]


def test_the_model_calls_and_reports(daemon: Daemon) -> None:
    body: dict[str, Any] = {"model": BUNDLED_NAME, "max_tokens": 80, "tools": TOOLS}
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        first = client.messages.create(messages=WEATHER, **body)
        (call,) = first.content
        assert first.stop_reason == "tool_use" and call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": '{"temperature": 18, "condition": "sunny"}',
        }
        history: list[Any] = [
            *WEATHER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(messages=history, **body) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        counted = client.messages.count_tokens(
            model=BUNDLED_NAME, messages=history, tools=TOOLS
        ).input_tokens
    assert text == "It is 18 degrees and sunny in Paris."
    assert last.stop_reason == "end_turn"
    cached = last.usage.cache_read_input_tokens or 0
    assert counted == last.usage.input_tokens + cached
