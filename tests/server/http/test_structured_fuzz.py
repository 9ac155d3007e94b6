"""Whatever is sent as a format, a grammar or a tool: an answer or a 400, and everybody is served
after it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.http.served import Served
from tests.server.http.test_tools import HERMES, USER, checkpoint_of, says, serve

WORDS = ["type", "object", "properties", "items", "enum", "$ref", "#", "#/$defs/a", "string"]
text = st.one_of(st.sampled_from(WORDS), st.text(max_size=12))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=4)),
    max_leaves=8,
)
schemas = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(st.sampled_from(["object", "array", "string", "integer"]), values),
        "properties": st.one_of(st.dictionaries(text, values, max_size=3), values),
        "required": values,
        "items": values,
        "enum": values,
        "pattern": st.one_of(st.sampled_from(["[a-z]+", "(", "^a$", "\\d{2,}"]), text),
        "minimum": scalars,
        "maxLength": scalars,
        "$ref": text,
        "$defs": values,
        "anyOf": values,
    },
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.one_of(st.sampled_from(["f", "g"]), st.text(min_size=1, max_size=9))},
                optional={"parameters": st.one_of(schemas, values)},
            ),
        }
    ),
    max_size=3,
)
named = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": text})}
)
formats = st.fixed_dictionaries(
    {
        "type": st.just("json_schema"),
        "json_schema": st.fixed_dictionaries({"name": text, "schema": schemas}),
    }
)
grammars = st.one_of(
    st.fixed_dictionaries({"json": schemas}),
    st.fixed_dictionaries({"json": text}),
    st.fixed_dictionaries({"regex": text.filter(bool)}),
    st.fixed_dictionaries({"grammar": st.text(max_size=8).map('start: "a"{}'.format)}),
    st.fixed_dictionaries({"choice": st.lists(text.filter(bool), min_size=1, max_size=3)}),
)
fields = {
    "tools": tools,
    "tool_choice": st.one_of(st.sampled_from(["auto", "required", "none"]), named),
    "parallel_tool_calls": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "high"]),
    "include_reasoning": st.booleans(),
    "stream": st.booleans(),
}
asked = st.one_of(
    st.fixed_dictionaries({}, optional={**fields, "response_format": formats}),
    st.fixed_dictionaries({}, optional={**fields, "structured_outputs": grammars}),
    st.fixed_dictionaries({}, optional=fields),
)
# One field in some is anything at all.
names = st.sampled_from([*fields, "response_format", "structured_outputs"])
junk = st.one_of(st.just({}), st.just({}), st.dictionaries(names, values, max_size=1))
bodies = st.builds(lambda good, bad: {**good, **bad}, asked, junk)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(checkpoint_of(tmp_path_factory.mktemp("fuzz"), HERMES, ())) as served:
        yield served


@given(bodies)
@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_never_a_server_error(hermes: Served, body: dict[str, Any]) -> None:
    says(hermes, '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    response = hermes.post("/v1/chat/completions", {"messages": USER, "max_tokens": 20, **body})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert len(response.content) < 4096
        assert response.json()["error"]["type"] == "invalid_request_error"
    else:
        assert '"error"' not in response.text


def test_everybody_is_served_after_it(hermes: Served) -> None:
    says(hermes, "fine")
    assert hermes.chat(messages=USER)["choices"][0]["message"]["content"] == "fine"
    hermes.wait(lambda: hermes.num_running == 0)
