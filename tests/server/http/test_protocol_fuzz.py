"""Bodies of `/v1/responses` and `/v1/messages` with anything in any place: never a server error."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.http.anything import VALUES, nested, places, replaced
from tests.server.http.served import Served

PARTS: list[Any] = [{"type": "text", "text": "a"}]
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3,
    "system": PARTS,
    "messages": [
        {"role": "user", "content": PARTS},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": PARTS}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 1,
    "metadata": {"user_id": "u"},
    "chat_template_kwargs": {"a": 1},
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "max_output_tokens": 3,
    "instructions": "be",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "id": "r"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": "a"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "none",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "previous_response_id": None,
    "store": True,
    "temperature": 1,
}
PATHS = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
}


@pytest.mark.parametrize("path", PATHS)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_anything_anywhere(shared: Served, path: str, data: st.DataObject) -> None:
    body = PATHS[path]
    place = data.draw(st.sampled_from(list(places(body))))
    response = shared.post(path, replaced(body, place, data.draw(VALUES)))
    assert response.status_code < 500, (place, response.text)
    assert len(response.content) < 4096 or response.status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [50, 150, 240, 400, 800])
def test_deep_values_anywhere(served: Served, path: str, depth: int) -> None:
    body = PATHS[path]
    assert served.post(path, body).status_code == 200
    for place in places(body):
        response = served.post(path, replaced(body, place, nested(depth)))
        assert response.status_code < 500, (place, response.text)
    for key in ("extra", "logit_bias", "structured_outputs"):
        assert served.post(path, {**body, key: nested(depth)}).status_code < 500
