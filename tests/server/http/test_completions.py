"""`/v1/completions`: shapes of prompts and answers, streamed and not."""

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.server.http.checkpoints import token_id
from tests.server.http.fake_engine import NUM_CACHED, logprobs_of
from tests.server.http.served import Served

PATH = "/v1/completions"


def test_openai_client_whole_and_streamed(served: Served) -> None:
    with served.client() as client:
        whole = client.completions.create(model="tiny", prompt="hello world", max_tokens=3)
        assert whole.object == "text_completion"
        assert whole.choices[0].text == "hello worldhello"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 3)
        assert whole.usage.total_tokens == 5
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == NUM_CACHED
        stream = client.completions.create(
            model="tiny", prompt="hello world", max_tokens=3, stream=True
        )
        texts = [chunk.choices[0].text for chunk in stream]
    assert texts == ["hello", " world", "hello", ""]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "hello world"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello world"}]}),
    ],
)
def test_tokens_that_come_together_are_chunks_of_their_own(
    served: Served, path: str, body: Any
) -> None:
    def chunks() -> list[Any]:
        asked = {**body, "max_tokens": 9, "n": 2, "stream_options": {"include_usage": True}}
        events = served.stream(path, **asked)
        assert events[-1] == "[DONE]"
        return [
            (choice["index"], choice["finish_reason"], choice.get("text"), choice.get("delta"))
            for event in events[:-2]
            for choice in event["choices"]
        ]

    one_by_one = chunks()
    for engine in served.engines:
        engine.tokens_per_step = 4
    together = chunks()
    for index in range(2):
        mine = [chunk for chunk in together if chunk[0] == index]
        assert mine == [chunk for chunk in one_by_one if chunk[0] == index]
        # Why it ended is told last, and once.
        assert all(chunk[1] is None for chunk in mine[:-1])
        assert mine[-1][1] in ("length", "stop")


async def test_openai_async_client(served: Served) -> None:
    async with served.async_client() as client:
        stream = await client.completions.create(
            model="tiny", prompt="hello world", max_tokens=3, stream=True
        )
        texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == "hello worldhello"


def test_default_is_sixteen_tokens(served: Served) -> None:
    assert served.complete(prompt="hello")["usage"]["completion_tokens"] == 16
    assert served.complete(prompt="hello", max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_limit_is_exact_and_says_length(served: Served, max_tokens: int) -> None:
    answer = served.complete(prompt=[5, 6], max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [["hello"]]),
        (["hello", " world"], [["hello"], [" world"]]),
    ],
)
def test_text_prompts(
    served: Served, tokenizer: Tokenizer, prompt: Any, expected: list[list[str]]
) -> None:
    answer = served.complete(prompt=prompt, max_tokens=1, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    for choice, (text,) in zip(answer["choices"], expected, strict=True):
        assert choice["text"] == text
        assert choice["prompt_token_ids"] == tokenizer.encode(text).ids


def test_token_prompts(served: Served) -> None:
    one = served.complete(prompt=[97, 98], max_tokens=2, return_token_ids=True)
    assert one["choices"][0]["token_ids"] == [97, 98]
    two = served.complete(prompt=[[97], [98, 99]], max_tokens=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in two["choices"]] == [[97, 97], [98, 99]]
    assert [choice["prompt_token_ids"] for choice in two["choices"]] == [[97], [98, 99]]


def test_several_prompts_with_several_choices_each(served: Served) -> None:
    answer = served.complete(prompt=[[10], [20, 21]], n=2, max_tokens=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert ids == [[10, 10], [10, 10], [20, 21], [20, 21]]
    # Prompts count once: 1 + 2; cached tokens once per prompt.
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2 * NUM_CACHED},
    }


def test_streamed_usage_is_one_last_chunk_and_equals_the_whole(served: Served) -> None:
    body: dict[str, Any] = {"prompt": [[10], [20, 21]], "n": 2, "max_tokens": 5}
    whole = served.complete(**body)
    plain = served.stream(PATH, **body)
    assert plain[-1] == "[DONE]" and all("usage" not in event for event in plain[:-1])
    events = served.stream(PATH, **body, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-2])
    texts = [""] * 4
    for event in events[:-2]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_golden_stream(served: Served) -> None:
    events = served.stream(PATH, prompt="hello world", max_tokens=2)
    head = {key: events[0][key] for key in ("id", "created", "system_fingerprint")}
    assert head["id"].startswith("cmpl-") and head["system_fingerprint"].startswith("moed-")

    def chunk(text: str, finish: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
        }
        return {**head, "object": "text_completion", "model": "tiny", "choices": [choice]}

    assert events == [
        chunk("hello", None),
        chunk(" world", None),
        chunk("", "length"),
        "[DONE]",
    ]


def test_echo(served: Served) -> None:
    answer = served.complete(prompt="hello world", echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "hello worldhello"
    answer = served.complete(prompt=[[97], [98]], echo=True, max_tokens=1)
    assert [len(choice["text"]) for choice in answer["choices"]] == [2, 2]
    events = served.stream(PATH, prompt="hello world", echo=True, max_tokens=2)
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert texts == ["hello worldhello", " world", ""]


def test_echo_with_logprobs_scores_the_prompt(served: Served, tokenizer: Tokenizer) -> None:
    prompt = "hello world hello"
    ids = tokenizer.encode(prompt).ids
    answer = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    found = answer["choices"][0]["logprobs"]
    texts = [tokenizer.decode([token]) for token in [*ids, ids[0]]]
    assert found["tokens"] == texts
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = [logprobs_of(token, 1, 400).logprob for token in [*ids[1:], ids[0]]]
    assert found["token_logprobs"][1:] == expected
    offsets, total = [], 0
    for text in texts:
        offsets.append(total)
        total += len(text)
    assert found["text_offset"] == offsets


def test_scoring_alone_gives_the_prompt_and_no_token_more(served: Served) -> None:
    answer = served.complete(prompt=[97, 98, 99], echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 3 and len(choice["logprobs"]["tokens"]) == 3
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    plain = served.complete(prompt="hello world", echo=True, max_tokens=0)
    assert plain["choices"][0]["text"] == "hello world"
    events = served.stream(PATH, prompt="hello world", echo=True, max_tokens=0)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["hello world", ""]


def test_logprobs_hold_the_top_k_and_the_chosen_token(served: Served, tokenizer: Tokenizer) -> None:
    token = token_id(tokenizer, "x")
    answer = served.complete(prompt=[token], max_tokens=2, logprobs=2)
    found = answer["choices"][0]["logprobs"]
    # The made-up probabilities: the token itself, then the next id with one less.
    other = tokenizer.decode([token + 1])
    assert found["tokens"] == ["x", "x"]
    assert found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"x": -token / 100, other: -token / 100 - 1}
    none = served.complete(prompt=[token], max_tokens=1, logprobs=0)
    assert none["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -token / 100}]


def test_logprobs_come_whole_in_a_stream(served: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("né!").ids
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 7, "logprobs": 2, "return_token_ids": True}
    whole = served.complete(**body)["choices"][0]
    merged: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
    token_ids: list[int] = []
    for event in served.stream(PATH, **body)[:-1]:
        (choice,) = event["choices"]
        token_ids += choice["token_ids"]
        for key, values in (choice["logprobs"] or {}).items():
            merged[key] += values
    assert merged == whole["logprobs"]
    assert token_ids == whole["token_ids"]


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 ok", "שלום", "日本"])
def test_characters_of_many_tokens_are_never_split(
    served: Served, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text).ids
    for max_tokens in (len(ids), len(ids) - 1):
        body: dict[str, Any] = {"prompt": ids, "max_tokens": max_tokens}
        whole = served.complete(**body)["choices"][0]["text"]
        events = served.stream(PATH, **body)[:-1]
        texts = [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == whole
        assert not any("\ufffd" in piece for piece in texts[:-2])
        assert (whole == text) == (max_tokens == len(ids))


def output(served: Served, tokenizer: Tokenizer, text: str) -> None:
    """Have the engines say `text`."""
    for engine in served.engines:
        engine.script = lambda request: tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("y fox ju", "The quick brown fox jumps over the lazy dog", None),
        ("wn fox ju", "The quick bro", "wn fox ju"),
        (["zzz", "r the"], "The quick brown fox jumps ove", "r the"),
        (["The"], "", "The"),
        ("jumpsuit", "The quick brown fox jumps over the lazy dog", None),
    ],
)
def test_stop_string_across_tokens(
    served: Served, tokenizer: Tokenizer, stop: Any, expected: str, reason: str | None
) -> None:
    output(served, tokenizer, "The quick brown fox jumps over the lazy dog")
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 99, "stop": stop}
    whole = served.complete(**body)["choices"][0]
    assert whole["text"] == expected
    assert whole["finish_reason"] == ("length" if reason is None else "stop")
    assert whole["stop_reason"] == reason
    events = served.stream(PATH, **body)
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["stop_reason"] == reason
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


def test_stop_string_in_the_output_when_asked_for(served: Served, tokenizer: Tokenizer) -> None:
    output(served, tokenizer, "one two three")
    answer = served.complete(prompt="x", max_tokens=99, stop="two", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "one two"


def test_stop_string_frees_the_engine_and_counts_its_tokens(
    served: Served, tokenizer: Tokenizer
) -> None:
    output(served, tokenizer, "abc" * 100)
    answer = served.complete(prompt="x", max_tokens=300, stop="cab")
    num_tokens = answer["usage"]["completion_tokens"]
    ids = tokenizer.encode("abc" * 100).ids
    assert "cab" in tokenizer.decode(ids[:num_tokens])
    assert "cab" not in tokenizer.decode(ids[: num_tokens - 1])
    served.wait(lambda: served.num_running == 0)


def test_stop_string_before_min_tokens_does_not_count(served: Served, tokenizer: Tokenizer) -> None:
    output(served, tokenizer, "a!b!c!d!")
    answer = served.complete(prompt="x", max_tokens=8, stop="!", min_tokens=4)
    assert answer["choices"][0]["text"] == "a!b"
    assert served.last_request.params.min_tokens == 4


def test_stop_token_is_counted_but_not_shown(served: Served, tokenizer: Tokenizer) -> None:
    a, b = token_id(tokenizer, "a"), token_id(tokenizer, "b")
    body: dict[str, Any] = {"prompt": [a, a, b], "max_tokens": 9, "stop_token_ids": [b]}
    answer = served.complete(**body, return_token_ids=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "aa"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", b)
    assert choice["token_ids"] == [a, a, b]
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 3
    shown = served.complete(**body, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == "aab"


def test_end_of_text_ends_and_ignore_eos_goes_on(served: Served, tokenizer: Tokenizer) -> None:
    a, end = token_id(tokenizer, "a"), served.config.model.eos_token_ids[0]
    body: dict[str, Any] = {"prompt": [a, end], "max_tokens": 4}
    (choice,) = served.complete(**body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    answer = served.complete(**body, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["text"] == "aa"
    assert served.last_request.params.stop_token_ids == []
    shown = served.complete(**body, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|im_end|>" * 2


def test_parameters_reach_the_engine(served: Served) -> None:
    served.complete(
        prompt=[7],
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "8": 1.5},
        seed=-1,
        priority=-3,
        cache_salt="tenant",
        user="somebody",
    )
    request = served.last_request
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == {7: -100.0, 8: 1.5}
    assert params.seed == 2**64 - 1
    assert request.priority == -3 and request.cache_salt == "tenant"


def test_requests_without_a_seed_get_different_ones(served: Served) -> None:
    seeds = set()
    for _ in range(4):
        served.complete(prompt=[7], max_tokens=1)
        seeds.add(served.last_request.params.seed)
    assert len(seeds) == 4


def test_choices_have_seeds_of_their_own_that_come_again(served: Served) -> None:
    def seeds() -> list[int]:
        before = [len(engine.added) for engine in served.engines]
        served.complete(prompt=[[7], [8]], n=3, seed=5, max_tokens=1)
        added = [
            request
            for engine, start in zip(served.engines, before, strict=True)
            for request in engine.added[start:]
        ]
        of_first = [r.params.seed for r in added if r.prompt_token_ids == [7]]
        of_second = [r.params.seed for r in added if r.prompt_token_ids == [8]]
        assert sorted(of_first) == sorted(of_second)
        return sorted(of_first)

    first = seeds()
    assert len(set(first)) == 3 and 5 in first
    assert seeds() == first


def test_tiny_temperature_is_greedy(served: Served) -> None:
    served.complete(prompt=[7], max_tokens=1, temperature=1e-7)
    assert served.last_request.params.temperature == 0


def test_client_ids_are_echoed_and_never_used_inside(served: Served) -> None:
    for _ in range(2):
        response = served.post(
            PATH, {"prompt": [7], "max_tokens": 1}, headers={"X-Request-Id": "mine"}
        )
        assert response.headers["x-request-id"] == "mine"
        assert served.last_request.request_id != "mine"
    response = served.post(PATH, {"prompt": [7], "max_tokens": 1, "request_id": "body-id"})
    assert response.headers["x-request-id"] == "body-id"
    own = served.post(PATH, {"prompt": [7], "max_tokens": 1}).headers["x-request-id"]
    assert own.startswith("req-")
    odd = served.get("/livez", headers={"X-Request-Id": "with space"})
    assert odd.headers["x-request-id"].startswith("req-")


def test_unknown_parameters_are_served_and_told(served: Served) -> None:
    body = {"prompt": [7], "max_tokens": 1, "tempature": 1, "stream_options": None, "zzz": [1]}
    response = served.post(PATH, body)
    assert response.status_code == 200
    assert response.headers["x-moed-ignored-params"] == "tempature, zzz"
    warnings = response.json()["warnings"]
    assert len(warnings) == 2 and "tempature" in warnings[0]
    events = served.stream(PATH, **body)
    assert events[0]["warnings"] == warnings
    assert all("warnings" not in event for event in events[1:-1])


def test_server_sent_event_headers(served: Served) -> None:
    response = served.post(PATH, {"prompt": [7], "max_tokens": 1, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(frame.removeprefix("data: ")) for frame in frames[:-2])


def test_model_by_any_of_its_names_or_none(served: Served) -> None:
    assert served.complete(prompt=[7], max_tokens=1)["model"] == "tiny"
    named = served.complete(prompt=[7], max_tokens=1, model="org/tiny-moe")
    assert named["model"] == "org/tiny-moe"


@pytest.mark.parametrize("name", ["tniy", "", "x" * 5000])
def test_other_models_are_not_found(served: Served, name: str) -> None:
    with served.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=name, prompt="a")
    assert caught.value.code == "model_not_found"
    assert ("did you mean 'tiny'" in str(caught.value)) == (name == "tniy")


@pytest.mark.parametrize(("most", "kept"), [(2, [3, 4]), (9, [1, 2, 3, 4]), (-1, [1, 2, 3, 4])])
def test_prompts_are_cut_from_the_left(served: Served, most: int, kept: list[int]) -> None:
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 1, "truncate_prompt_tokens": most}
    answer = served.post(PATH, body).json()
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert served.last_request.prompt_token_ids == kept


def test_a_cut_makes_any_length_fit(served: Served) -> None:
    body = {"prompt": "hello " * 5000, "max_tokens": 1}
    assert served.post(PATH, body).status_code == 400
    assert served.post(PATH, {**body, "truncate_prompt_tokens": -1}).status_code == 200
    messages = [{"role": "user", "content": "hello " * 5000}]
    chat = {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 20}
    answer = served.post("/v1/chat/completions", chat)
    assert answer.json()["usage"]["prompt_tokens"] == 20


def test_bad_words_and_allowed_tokens_reach_the_engine(served: Served) -> None:
    body = {"prompt": [1], "max_tokens": 1, "bad_words": ["world"], "allowed_token_ids": [5, 6]}
    assert served.post(PATH, body).status_code == 200
    params = served.last_request.params
    assert params.allowed_token_ids == [5, 6]
    # As the beginning of a text, and after a space.
    texts = [served.post("/detokenize", {"tokens": w}).json()["prompt"] for w in params.bad_words]
    assert texts == ["world", " world"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [10**9]),
        ("allowed_token_ids", ["1"]),
        ("bad_words", [""]),
        ("bad_words", ["x" * 101]),
        ("bad_words", ["x"] * 129),
        ("bad_words", "x"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.5),
    ],
)
def test_values_that_are_refused(served: Served, name: str, value: Any) -> None:
    answer = served.post(PATH, {"prompt": [1], "max_tokens": 1, name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)


def test_prompt_logprobs(served: Served) -> None:
    """The fake engine gives token t minus t / 100, and t, t + 1, … as the likeliest."""
    body = {"prompt": [1, 7, 9], "max_tokens": 1, "prompt_logprobs": 2}
    first, *rest = served.post(PATH, body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, entry in zip([7, 9], rest, strict=True):
        assert list(entry) == [str(token), str(token + 1)]
        assert [entry[str(token)][name] for name in ("logprob", "rank")] == [-token / 100, 1]
        assert entry[str(token + 1)]["rank"] == 2 and entry[str(token + 1)]["decoded_token"]
    echoed = served.post(PATH, {**body, "echo": True}).json()["choices"][0]
    assert echoed["prompt_logprobs"][1:] == rest and echoed["logprobs"] is None
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 0}
    found = served.post("/v1/chat/completions", chat).json()["prompt_logprobs"]
    prompt = served.last_request.prompt_token_ids
    assert [list(entry) for entry in found[1:]] == [[str(token)] for token in prompt[1:]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_logprobs": 21}, "at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "cannot be streamed"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "must be the same number"),
        ({"prompt_logprobs": -1}, ""),
    ],
)
def test_prompt_logprobs_that_are_refused(
    served: Served, changes: dict[str, Any], words: str
) -> None:
    answer = served.post(PATH, {"prompt": [1, 2], "max_tokens": 1, **changes})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert words in answer.json()["error"]["message"]
