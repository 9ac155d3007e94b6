"""`/v1/chat/completions`: whole and streamed, as `openai` reads it."""

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.server.http.checkpoints import END, START, token_id
from tests.server.http.fake_engine import NUM_CACHED
from tests.server.http.served import Served

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = f"{START}user\nhi{END}\n{START}assistant\n"


@pytest.fixture(autouse=True)
def answer(served: Served, tokenizer: Tokenizer) -> None:
    """Every answer is this one."""
    ids = [*tokenizer.encode("hello world").ids, token_id(tokenizer, END)]
    for engine in served.engines:
        engine.script = lambda request: ids


def test_openai_client(served: Served, tokenizer: Tokenizer) -> None:
    with served.client() as client:
        found = client.chat.completions.create(model="tiny", messages=USER)
    (choice,) = found.choices
    assert found.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
    assert choice.finish_reason == "stop"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(tokenizer.encode(PROMPT).ids)
    assert found.usage.completion_tokens == 3
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == NUM_CACHED
    assert served.last_request.prompt_token_ids == tokenizer.encode(PROMPT).ids


async def test_openai_async_client_streams(served: Served) -> None:
    async with served.async_client() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == "hello world"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_golden_stream(served: Served) -> None:
    events = served.stream(PATH, messages=USER, stream_options={"include_usage": True})
    head = {key: events[0][key] for key in ("id", "created", "system_fingerprint")}
    assert head["id"].startswith("chatcmpl-")
    head |= {"object": "chat.completion.chunk", "model": "tiny"}

    def chunk(delta: dict[str, str], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**head, "choices": [choice], "usage": None}

    usage = events[-2]["usage"]
    assert events == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "hello"}),
        chunk({"content": " world"}),
        chunk({}, finish_reason="stop", stop_reason=None),
        {**head, "choices": [], "usage": usage},
        "[DONE]",
    ]
    assert usage == served.chat(messages=USER)["usage"]


def test_without_include_usage_no_chunk_has_it(served: Served) -> None:
    events = served.stream(PATH, messages=USER)
    assert all("usage" not in event and event["choices"] for event in events[:-1])


def test_several_choices_open_and_end_one_by_one(served: Served) -> None:
    events = served.stream(PATH, messages=USER, n=3)[:-1]
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"].get("role") for choice in choices[:3]] == ["assistant"] * 3
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "hello world"
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]
    whole = served.chat(messages=USER, n=3)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9


def test_default_is_the_rest_of_the_context(served: Served) -> None:
    served.chat(messages=USER)
    request = served.last_request
    assert len(request.prompt_token_ids) + request.params.max_tokens == 512
    served.chat(messages=USER, max_tokens=3)
    assert served.last_request.params.max_tokens == 3
    served.chat(messages=USER, max_tokens=3, max_completion_tokens=2)
    assert served.last_request.params.max_tokens == 2


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_in_the_chat_shape(served: Served, tokenizer: Tokenizer, top: int) -> None:
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": top}
    whole = served.chat(**body)["choices"][0]["logprobs"]
    content = whole["content"]
    assert [entry["token"] for entry in content] == ["hello", " world", END]
    first = tokenizer.encode("hello").ids[0]
    assert content[0]["logprob"] == -first / 100
    assert bytes(content[0]["bytes"]).decode() == "hello"
    assert [len(entry["top_logprobs"]) for entry in content] == [top] * 3
    for entry in content[0]["top_logprobs"]:
        assert sorted(entry) == ["bytes", "logprob", "token"]
    streamed = []
    for event in served.stream(PATH, **body)[:-1]:
        if (found := event["choices"][0]["logprobs"]) is not None:
            streamed += found["content"]
    assert streamed == content


def test_no_logprobs_unless_asked_for(served: Served) -> None:
    assert served.chat(messages=USER)["choices"][0]["logprobs"] is None
    assert served.last_request.params.logprobs is None


def test_logprobs_of_a_part_of_a_character_are_its_bytes(
    served: Served, tokenizer: Tokenizer
) -> None:
    for engine in served.engines:
        engine.script = lambda request: tokenizer.encode("é").ids
    content = served.chat(messages=USER, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_return_token_ids(served: Served, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hello world").ids, token_id(tokenizer, END)]
    prompt_ids = tokenizer.encode(PROMPT).ids
    whole = served.chat(messages=USER, return_token_ids=True)
    assert whole["prompt_token_ids"] == prompt_ids
    assert whole["choices"][0]["token_ids"] == ids
    events = served.stream(PATH, messages=USER, return_token_ids=True)[:-1]
    assert events[0]["prompt_token_ids"] == prompt_ids
    streamed = [t for event in events for t in event["choices"][0].get("token_ids", [])]
    assert streamed == ids


def prompt_text(served: Served, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(served.last_request.prompt_token_ids, skip_special_tokens=False)
    return text


def test_text_parts_are_joined(served: Served, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    served.chat(messages=[{"role": "user", "content": parts}])
    assert f"{START}user\none\ntwo{END}" in prompt_text(served, tokenizer)


def test_all_roles_reach_the_template(served: Served, tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    served.chat(
        messages=[
            {"role": "developer", "content": "short"},
            {"role": "user", "content": "q", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
            {"role": "assistant", "content": "four", "tool_calls": []},
            {"role": "user", "content": "thanks"},
        ]
    )
    # This template knows nothing of developers: their words are the system's.
    assert prompt_text(served, tokenizer) == (
        f"{START}system\nshort{END}\n{START}user\nq{END}\n{START}assistant\n{END}\n"
        f"{START}tool\n4{END}\n{START}assistant\nfour{END}\n{START}user\nthanks{END}\n"
        f"{START}assistant\n"
    )


def test_assistant_without_content_or_calls(served: Served, tokenizer: Tokenizer) -> None:
    served.chat(messages=[*USER, {"role": "assistant", "content": None}, *USER])
    assert f"{START}assistant\n{END}\n" in prompt_text(served, tokenizer)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_are_rendered(served: Served, tokenizer: Tokenizer) -> None:
    served.chat(messages=USER, tools=[TOOL])
    text = prompt_text(served, tokenizer)
    assert '{"type": "function", "function": {"name": "add", "parameters"' in text
    served.chat(messages=USER, tools=[TOOL], tool_choice="none")
    assert "add" not in prompt_text(served, tokenizer)


def test_ending_of_the_prompt(served: Served, tokenizer: Tokenizer) -> None:
    served.chat(messages=USER, add_generation_prompt=False)
    assert prompt_text(served, tokenizer).endswith(f"hi{END}\n")
    begun = [*USER, {"role": "assistant", "content": "The sum is "}]
    served.chat(messages=begun, continue_final_message=True)
    assert prompt_text(served, tokenizer).endswith(f"{START}assistant\nThe sum is ")
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    assert served.post(PATH, both).status_code == 400


def test_stop_string(served: Served) -> None:
    answer = served.chat(messages=USER, stop=["o w"])
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "hell"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o w")


def test_wrong_model_is_not_found(served: Served) -> None:
    with served.client() as client, pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=USER)
