"""Structured output from the bundled model over two ranks: jsonschema and `re` judge."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import psutil
import pydantic
import pytest

from moed.config.model import BUNDLED_NAME
from tests.daemon import Daemon, events, wait_gone

CITY = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 30},
        "sure": {"type": "boolean"},
        "ranks": {
            "type": "array",
            # Bounded: a wild enough choice of digits would not end before `max_tokens`.
            "items": {"type": "integer", "minimum": -5, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["answer", "sure", "ranks"],
    "additionalProperties": False,
}


def ask(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


class City(pydantic.BaseModel):
    answer: str


@pytest.mark.parametrize("rank", [0, 1])
def test_every_choice_fits_the_schema(daemon: Daemon, rank: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}
    body = {
        "messages": ask("What is the capital of France? Answer in JSON."),
        "response_format": wanted,
        "n": 4,
        "temperature": 1.5,
        "seed": 5,
        "max_tokens": 300,
    }
    first = daemon.post("/v1/chat/completions", body, rank).json()
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["finish_reason"] for choice in first["choices"]] == ["stop"] * 4
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)
    assert len(set(texts)) > 1
    # A pure function of the seed: on the other rank too.
    again = daemon.post("/v1/chat/completions", body, 1 - rank).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == texts


def test_openai_client_parses_into_a_model(daemon: Daemon) -> None:
    with daemon.client() as client:
        found = client.chat.completions.parse(
            model=BUNDLED_NAME,
            messages=ask("What is the capital of France? Answer in JSON."),
            response_format=City,
            max_tokens=100,
        )
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.parsed == City(answer="Paris")


def test_json_object(daemon: Daemon) -> None:
    body = {
        "messages": ask("What is the capital of France? Answer in JSON."),
        "response_format": {"type": "json_object"},
        "max_tokens": 200,
    }
    answer = daemon.post("/v1/chat/completions", body).json()
    # What the model says by itself.
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"answer": "Paris"}


def test_streams_the_same(daemon: Daemon) -> None:
    body = {
        "prompt": "x",
        "structured_outputs": {"regex": r"[A-C]{3}-\d{4}"},
        "max_tokens": 40,
        "temperature": 1,
        "seed": 3,
    }
    whole = daemon.post("/v1/completions", body).json()["choices"][0]
    assert re.fullmatch(r"[A-C]{3}-\d{4}", whole["text"]) and whole["finish_reason"] == "stop"
    with httpx.stream(
        "POST", f"{daemon.url}/v1/completions", json={**body, "stream": True}, timeout=30
    ) as response:
        pieces = [
            choice["text"]
            for event in events(response)
            if event != "[DONE]"
            for choice in event["choices"]
        ]
    assert "".join(pieces) == whole["text"]


def test_choice_and_grammar(daemon: Daemon) -> None:
    for given, allowed in (
        ({"choice": ["Berlin", "Rome"]}, {"Berlin", "Rome"}),
        ({"grammar": 'start: "left" | "right"'}, {"left", "right"}),
    ):
        body = {"messages": ask("Where?"), "structured_outputs": given, "max_tokens": 20}
        answer = daemon.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] in allowed


def test_bad_schemas_leave_both_ranks_alone(daemon: Daemon) -> None:
    """The fixture looks at every rank afterwards."""
    for schema in ({"type": "nope"}, {"$ref": "#"}, {"type": "string", "pattern": "("}):
        for rank in (0, 1):
            body = {"prompt": "x", "structured_outputs": {"json": schema}, "max_tokens": 3}
            assert daemon.post("/v1/completions", body, rank).status_code == 400
            for good in (CITY, {"type": "integer", "maximum": 2e10}):
                body = {"prompt": "x", "structured_outputs": {"json": good}, "max_tokens": 3}
                assert daemon.post("/v1/completions", body, rank).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": {"regex": "a{1,3}"}, "bad_words": ["a"]},
        {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [1]},
    ],
)
def test_a_request_that_allows_no_token_is_the_clients_fault(daemon: Daemon, given: Any) -> None:
    body = {"prompt": "x", "max_tokens": 5, **given}
    url = f"{daemon.url}/v1/completions"
    refused = httpx.post(url, json=body, timeout=20)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "leave no token to choose" in error["message"]
    assert error["type"] == "invalid_request_error"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=20) as response:
        # Where the failure comes before the first event, it may still be a plain answer.
        if response.status_code == 400:
            assert json.loads(response.read())["error"] == error
        else:
            assert [event["error"] for event in events(response) if "error" in event] == [error]


def test_empty_schema_ends_at_max_tokens_at_the_latest(daemon: Daemon) -> None:
    body = {"prompt": "12 + ", "structured_outputs": {"json": {}}, "max_tokens": 30}
    answer = daemon.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] <= 30


def test_preemption_and_tensor_parallelism_change_nothing() -> None:
    """Few KV blocks: four streams push each other out, and are computed again."""
    bodies = [
        {
            "prompt": [65 + index] * 20,
            "structured_outputs": {"json": CITY},
            "max_tokens": 150,
            "temperature": 1.2,
            "seed": index,
        }
        for index in range(4)
    ]
    small = ("--num-kv-blocks", "14", "--max-model-len", "200", "--tensor-parallel-size", "2")
    with Daemon(*small, ranks=1) as daemon:
        daemon.wait_ready()
        alone = [daemon.post("/v1/completions", body).json() for body in bodies]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda b: daemon.post("/v1/completions", b).json(), bodies))
        assert daemon.metrics()["moed:num_preemptions_total", 0] > 0
    texts = [answer["choices"][0]["text"] for answer in together]
    assert texts == [answer["choices"][0]["text"] for answer in alone]
    for answer in together:
        if answer["choices"][0]["finish_reason"] == "stop":
            jsonschema.validate(json.loads(answer["choices"][0]["text"]), CITY)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_process_is_left_behind(number: signal.Signals) -> None:
    """The one that tries grammars out ends with the others."""
    with Daemon() as daemon:
        daemon.wait_ready()
        body = {"prompt": "x", "structured_outputs": {"regex": "[0-9]"}, "max_tokens": 2}
        assert daemon.post("/v1/completions", body).status_code == 200
        pids = [child.pid for child in psutil.Process(daemon.process.pid).children(recursive=True)]
        # The front end, two ranks, and that one.
        assert len([p for p in pids if "resource_tracker" not in _command(p)]) == 4
        daemon.signal(number)
        code = daemon.wait_exit(20)
        wait_gone(pids, 5)
    assert code == (0 if number is signal.SIGTERM else -number)


def _command(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def test_the_process_that_tries_grammars_is_replaced_when_it_dies(daemon: Daemon) -> None:
    def ask_for(regex: str) -> int:
        body = {"prompt": "x", "structured_outputs": {"regex": regex}, "max_tokens": 2}
        return daemon.post("/v1/completions", body).status_code

    def found() -> list[psutil.Process]:
        front_end = psutil.Process(daemon.pid("http"))
        return [p for p in front_end.children() if "resource_tracker" not in _command(p.pid)]

    assert ask_for("before") == 200
    (process,) = found()
    process.kill()
    wait_gone([process.pid], 5)
    assert ask_for("after") == 200
    assert [p.pid for p in found()] != [process.pid]
