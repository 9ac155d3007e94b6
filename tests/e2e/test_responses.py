"""`/v1/responses` with the bundled model, through the `openai` client."""

import json
from typing import Any

from moed.config.model import BUNDLED_NAME
from tests.daemon import Daemon
from tests.e2e.test_tools import CITY

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True},
]


def test_the_model_calls_and_reports(daemon: Daemon) -> None:
    body: dict[str, Any] = {"model": BUNDLED_NAME, "max_output_tokens": 80, "tools": TOOLS}
    with daemon.client() as client:
        first = client.responses.create(input="What is the weather in Paris?", **body)
        (call,) = first.output
        assert call.type == "function_call" and call.name == "get_weather"
        assert json.loads(call.arguments) == {"city": "Paris"}
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": '{"temperature": 18, "condition": "sunny"}',
        }
        with client.responses.stream(
            input=[result], previous_response_id=first.id, **body
        ) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            last = stream.get_final_response()
    assert "".join(deltas) == last.output_text == "It is 18 degrees and sunny in Paris."
    assert last.status == "completed"


def test_structured_output(daemon: Daemon) -> None:
    form: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    with daemon.client() as client:
        answer = client.responses.create(
            model=BUNDLED_NAME, input="Where?", text={"format": form}, temperature=0
        )
    assert set(json.loads(answer.output_text)) == {"city"}
