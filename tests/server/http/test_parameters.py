"""Parameters that change what is sent, or that others call by another name."""

import json
import pathlib
from typing import Any

import pytest
from tokenizers import Tokenizer

from moed.server.messages import ReasoningLimit
from tests.server.http.checkpoints import CHATML, token_id
from tests.server.http.served import Served
from tests.server.http.test_tools import HARMONY, HARMONY_MARKS, checkpoint_of, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("side", "most", "kept"),
    [
        (None, 2, [7, 8]),
        ("left", 2, [7, 8]),
        ("right", 2, [5, 6]),
        ("right", 9, [5, 6, 7, 8]),
        ("right", None, [5, 6, 7, 8]),
    ],
)
def test_side_of_truncation(served: Served, side: Any, most: Any, kept: list[int]) -> None:
    body = {"truncate_prompt_tokens": most, "truncation_side": side, "max_tokens": 1}
    served.complete(prompt=[5, 6, 7, 8], **body)
    assert served.last_request.prompt_token_ids == kept


def test_as_much_as_fits_of_the_beginning(served: Served) -> None:
    body = {"truncate_prompt_tokens": -1, "truncation_side": "right", "max_tokens": 1}
    served.complete(prompt=[5, *[6] * 600], **body)
    assert served.last_request.prompt_token_ids == [5, *[6] * 510]


def test_tokens_by_their_ids(served: Served) -> None:
    named: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    (choice,) = served.complete(prompt=[70, 71], logprobs=2, **named)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:70", "token_id:71"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:70", "token_id:71"}
    (choice,) = served.chat(messages=HELLO, logprobs=True, top_logprobs=1, **named)["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token"].startswith("token_id:") and first["bytes"]
    assert first["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_in_every_chunk(served: Served, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "n": 2}
    body |= {"prompt": [5, 6]} if path == COMPLETIONS else {"messages": HELLO}
    options = {"continuous_usage_stats": True, "include_usage": True}
    *events, done = served.stream(path, **body, stream_options=options)
    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    assert events[-1]["choices"] == []
    without = served.stream(path, **body, stream_options={"continuous_usage_stats": True})
    assert without[-2]["choices"] and without[-2]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (99, [1, 7])])
def test_tokens_sent_together(served: Served, interval: int, sizes: list[int]) -> None:
    ids = list(range(65, 73))
    for engine in served.engines:
        engine.script = lambda request: ids
    body: dict[str, Any] = {"prompt": [5], "max_tokens": 8, "return_token_ids": True}
    events = served.stream(COMPLETIONS, stream_interval=interval, **body)[:-1]
    sent = [event["choices"][0]["token_ids"] for event in events]
    assert [len(tokens) for tokens in sent if tokens] == sizes
    assert [token for tokens in sent for token in tokens] == ids
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == served.complete(**body)["choices"][0]["text"]


def test_what_is_held_comes_with_the_end(served: Served) -> None:
    """Text and tokens of pieces that wait are all there when a stop string ends the choice."""
    for engine in served.engines:
        engine.script = lambda request: served.state.tools.tokenizer.encode("abcdefgh", False)
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 50, "stop": "fg"}
    whole = served.complete(**body)["choices"][0]
    streamed = served.stream(COMPLETIONS, stream_interval=50, **body)[:-1]
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole["text"] == "abcde"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


GRAMMARS = [
    ({"regex": "[ab]+"}, "regex"),
    ({"guided_regex": "[ab]+"}, "guided_regex"),
    ({"json_schema": {"type": "integer"}}, "json_schema"),
    ({"json_schema": '{"type":"integer"}'}, "json_schema"),
    ({"guided_json": {"type": "integer"}}, "guided_json"),
    ({"ebnf": 'root ::= "a" | "b"'}, "ebnf"),
    ({"grammar": 'start: "a" | "b"'}, "grammar"),
]


@pytest.mark.parametrize(("given", "name"), GRAMMARS)
def test_other_names_of_grammars(served: Served, given: dict[str, Any], name: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        answer = served.post(path, {**prompt, "max_tokens": 1, **given})
        assert answer.status_code == 200, answer.text
        assert "warnings" not in answer.json()
        assert served.last_request.params.grammar
    twice = served.post(COMPLETIONS, {"prompt": "a", **given, "structured_outputs": {"regex": "a"}})
    assert twice.status_code == 400 and name in twice.json()["error"]["message"]
    bad = served.post(COMPLETIONS, {"prompt": "a", name: "(" if "regex" in name else "{{{"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == name


def test_ids_under_their_other_name(served: Served) -> None:
    answer = served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "rid": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7" and "warnings" not in answer.json()
    assert served.post(COMPLETIONS, {"prompt": "a", "rid": "a b"}).status_code == 400


def test_parameters_without_effect_are_no_unknown_ones(served: Served) -> None:
    for name, value in {
        "spaces_between_special_tokens": False,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "session_id": "i",
        "user": "u",
    }.items():
        assert "warnings" not in served.complete(prompt="a", max_tokens=1, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("best_of", 4),
        ("length_penalty", 0.5),
        ("logprob_token_ids", [1]),
        ("stop_regex", "a+"),
        ("repetition_detection", {"min_count": 3}),
        ("guided_whitespace_pattern", " "),
        ("separate_reasoning", False),
        ("kv_transfer_params", {"a": 1}),
        ("suffix", "x"),
        ("thinking_token_budget", 5),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    served: Served, name: str, value: Any
) -> None:
    refused = served.post(COMPLETIONS, {"prompt": "a", name: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncation_side", "middle"),
        ("stream_interval", 0),
        ("thinking_token_budget", -1),
        ("return_tokens_as_token_ids", "yes"),
        ("regex", 5),
    ],
)
def test_values_that_are_none(served: Served, name: str, value: Any) -> None:
    refused = served.post(CHAT, {"messages": HELLO, name: value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name


# Reasoning ---------------------------------------------------------------------------------------

REASONER = CHATML + "{# <think> </think> #}"
MARKS = ("<think>", "</think>")


def test_a_budget_of_reasoning(tmp_path: pathlib.Path) -> None:
    folder = checkpoint_of(tmp_path, REASONER, MARKS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = (token_id(tokenizer, mark) for mark in MARKS)
    with serve(folder) as served:
        served.chat(messages=HELLO, max_tokens=1, thinking_token_budget=5)
        assert served.last_request.params.reasoning_limit == ReasoningLimit(begin, [end], 5)
        begun = [*HELLO, {"role": "assistant", "content": "<think>so"}]
        body: dict[str, Any] = {"messages": begun, "continue_final_message": True, "max_tokens": 1}
        served.chat(**body, thinking_token_budget=7)
        assert served.last_request.params.reasoning_limit == ReasoningLimit(None, [end], 7)
        served.chat(messages=HELLO, max_tokens=1)
        assert served.last_request.params.reasoning_limit is None
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = {"messages": HELLO, "max_tokens": 4, "thinking": thinking}
        assert served.post("/v1/messages", message).status_code == 200
        assert served.last_request.params.reasoning_limit == ReasoningLimit(begin, [end], 1024)


def test_a_budget_that_cannot_be_held_is_told(served: Served, tmp_path: pathlib.Path) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 1, "thinking_token_budget": 5}
    assert "has no effect" in json.dumps(served.chat(**body)["warnings"])
    with serve(checkpoint_of(tmp_path, HARMONY, HARMONY_MARKS)) as harmony:
        assert "several tokens" in json.dumps(harmony.chat(**body)["warnings"])
        assert harmony.last_request.params.reasoning_limit is None
