"""`response_format` and `structured_outputs`: what reaches the engines, and what is refused."""

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import pydantic
import pytest
from openai.lib._parsing._completions import type_to_response_format_param

from moed.server.grammar_checker import MAX_GRAMMAR_CHARACTERS
from tests.server.http.served import Served

USER = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar_of(served: Served, path: str, **body: Any) -> Any:
    """What the engine was told, as JSON where it is that."""
    response = served.post(path, {**PATHS[path], "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()
    text = served.last_request.params.grammar
    assert text is not None
    try:
        return json.loads(text)
    except ValueError:
        return text


def refusal(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = served.post(path, {**PATHS[path], "max_tokens": 2, **body})
    assert response.status_code == 400, response.text
    assert len(response.content) < 4096
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", PATHS)
def test_every_way_to_ask_reaches_the_engine(served: Served, path: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = grammar_of(served, path, response_format=wanted)
    (grammar,) = found["grammars"]
    assert grammar["json_schema"] == {
        **SCHEMA,
        **{"x-guidance": grammar["json_schema"]["x-guidance"]},
    }
    for same in (
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ):
        assert grammar_of(served, path, **same) == found
    any_object = grammar_of(served, path, response_format={"type": "json_object"})
    assert any_object["grammars"][0]["json_schema"]["type"] == "object"
    assert grammar_of(served, path, structured_outputs={"json_object": True}) == any_object
    regex = grammar_of(served, path, structured_outputs={"regex": "[a-z]/x"})
    assert regex["grammars"][0]["lark_grammar"] == r"start: /[a-z]\/x/"
    assert grammar_of(served, path, guided_regex="[a-z]/x") == regex
    choice = grammar_of(served, path, structured_outputs={"choice": ["a", 'b"']})
    assert choice == r'start: "a" | "b\""'
    assert grammar_of(served, path, guided_grammar='start: "a"') == grammar_of(
        served, path, structured_outputs={"grammar": 'start: "a"'}
    )


@pytest.mark.parametrize("path", PATHS)
def test_text_asks_for_nothing(served: Served, path: str) -> None:
    for body in ({"response_format": {"type": "text"}}, {"response_format": None}, {}):
        assert served.post(path, {**PATHS[path], "max_tokens": 1, **body}).status_code == 200
        assert served.last_request.params.grammar is None


def test_schema_of_the_openai_client(served: Served) -> None:
    class Step(pydantic.BaseModel):
        explanation: str
        output: str | None

    class Answer(pydantic.BaseModel):
        steps: list[Step]
        kind: str = pydantic.Field(description="of answer")

    wanted = type_to_response_format_param(Answer)
    assert grammar_of(served, "/v1/chat/completions", response_format=wanted)


BAD = {
    "type": ({"json": {"type": "nope"}}, "structured_outputs.json"),
    "json text": ({"json": "{"}, "structured_outputs.json"),
    "json array": ({"json": "[1]"}, "structured_outputs.json"),
    "empty": ({"json": " "}, "structured_outputs.json"),
    "reference to nothing": ({"json": {"$ref": "#/$defs/x"}}, "structured_outputs.json"),
    "reference to itself": ({"json": {"$ref": "#"}}, "structured_outputs.json"),
    "unknown keyword": ({"json": {"not": {"type": "string"}}}, "structured_outputs.json"),
    "impossible": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, None),
    "pattern": ({"json": {"type": "string", "pattern": "("}}, "structured_outputs.json"),
    "regex": ({"regex": "("}, "structured_outputs.regex"),
    "look-around": ({"regex": "(?=a)b"}, "structured_outputs.regex"),
    "huge regex": ({"regex": "((a{100}){100}){100}"}, "structured_outputs.regex"),
    "slow number": ({"json": {"type": "integer", "multipleOf": 999983}}, None),
    "many numbers": (
        {"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]}},
        None,
    ),
    "grammar": ({"grammar": 'start: "a" ('}, "structured_outputs.grammar"),
    "no choice": ({"choice": []}, "structured_outputs.choice"),
    "empty choice": ({"choice": [""]}, "structured_outputs.choice"),
    "two": ({"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    "wrong type": ({"regex": 5}, "structured_outputs.regex"),
    "many properties": (
        {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(9000)}}},
        None,
    ),
    "too large": ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "structured_outputs.regex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammar_is_refused_and_costs_nobody_else(served: Served, name: str) -> None:
    given, param = BAD[name]
    started = time.monotonic()
    error = refusal(served, "/v1/completions", structured_outputs=given)
    assert error["param"] == (param or "structured_outputs.json")
    assert time.monotonic() - started < 15
    # Good after bad.
    assert grammar_of(served, "/v1/completions", structured_outputs={"regex": "[0-9]+"})


def test_deep_schema_is_refused(served: Served) -> None:
    depth = 5000
    schema = '{"items":' * depth + "{}" + "}" * depth
    assert refusal(served, "/v1/completions", structured_outputs={"json": schema})


def test_others_are_served_while_a_slow_grammar_is_tried(served: Served) -> None:
    """The try is not on the event loop, nor in any process that serves."""
    grammar_of(served, "/v1/completions", structured_outputs={"regex": "warm"})
    slow = {
        "prompt": "hi",
        "structured_outputs": {"json": {"type": "integer", "multipleOf": 999979}},
    }
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.append(served.post("/v1/completions", slow).status_code)
    )
    thread.start()
    worst = 0.0
    while thread.is_alive():
        started = time.monotonic()
        plain = served.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
        worst = max(worst, time.monotonic() - started)
        assert plain.status_code == 200
    thread.join()
    assert found == [400]
    assert worst < 1.0


def test_both_parameters_exclude_each_other(served: Served) -> None:
    error = refusal(
        served,
        "/v1/completions",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a"},
    )
    assert "response_format" in error["message"] and "structured_outputs" in error["message"]


STRUCTURE = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "nope"}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format"),
        ({"type": "structural_tag", "triggers": ["<a"]}, "response_format"),
        (
            {"type": "structural_tag", "triggers": [""], "structures": [STRUCTURE]},
            "response_format.triggers[0]",
        ),
        (
            {"type": "structural_tag", "triggers": ["<b"], "structures": [STRUCTURE]},
            "response_format",
        ),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": []}},
            "response_format.format.type",
        ),
        ({}, "response_format.type"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        ("json", "response_format"),
    ],
)
def test_bad_response_format_is_named(served: Served, given: Any, param: str) -> None:
    assert refusal(served, "/v1/chat/completions", response_format=given)["param"] == param


TAGS: list[dict[str, Any]] = [
    {"triggers": ["<a"], "structures": [STRUCTURE]},
    {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<a>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                    "end": "</a>",
                }
            ],
        }
    },
]


@pytest.mark.parametrize("form", TAGS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_structural_tags(served: Served, path: str, form: dict[str, Any]) -> None:
    tags = {"type": "structural_tag", **form}
    as_text = json.dumps(tags)
    grammars = {
        grammar_of(served, path, response_format=tags),
        grammar_of(served, path, structured_outputs={"structural_tag": tags}),
        grammar_of(served, path, structured_outputs={"structural_tag": as_text}),
    }
    (grammar,) = grammars
    assert "opening_0[lazy]" in grammar and '"</a>"' in grammar
    both = {"response_format": tags, "structured_outputs": {"structural_tag": tags}}
    assert "give one of them" in refusal(served, path, **both)["message"]


def test_message_carries_the_grammar(served: Served) -> None:
    """As text: nothing of a library crosses between the processes."""
    grammar_of(served, "/v1/completions", structured_outputs={"regex": "x"})
    encoded = msgspec.msgpack.encode(served.last_request)
    assert b"start: /x/" in encoded


async def test_a_client_that_leaves_does_not_mix_up_the_answers(served: Served) -> None:
    """Its grammar is still being tried when others ask."""
    async with served.async_client() as client:

        async def ask(regex: str) -> None:
            await client.completions.create(
                model="tiny",
                prompt="hi",
                max_tokens=1,
                extra_body={"structured_outputs": {"regex": regex}},
            )

        leaving = [asyncio.create_task(ask(f"leaving{n}[a-z]{{40}}")) for n in range(8)]
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.gather(*(ask(f"staying{n % 3}") for n in range(9)))
    asked = [request.params.grammar or "" for request in served.arrivals[-9:]]
    assert sorted(text.count("staying") for text in asked) == [1] * 9
    for number in range(3):
        assert sum(f"staying{number}" in text for text in asked) == 3
