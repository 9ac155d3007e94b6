"""Tools and reasoning in chats, whole and streamed, with engines that say what they are told."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.server.http.checkpoints import (
    CHATML,
    END,
    byte_level_tokenizer,
    token_id,
    write_checkpoint,
)
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served
from tests.server.parsers.answers import ANSWERS, TOOLS, Answer

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL_LIST: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in TOOLS
]
HERMES = CHATML + "{# <tool_call> and </think> #}"
# Special, so that a decoder leaves them out.
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
HARMONY = (
    "{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "<|end|>{%- endfor %}<|start|>assistant{# <|channel|> #}"
)


def checkpoint_of(folder: pathlib.Path, template: str, marks: tuple[str, ...]) -> pathlib.Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return write_checkpoint(folder, tokenizer, chat_template=template, eos_token=END)


def serve(folder: pathlib.Path, **server: Any) -> Served:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    eos = (token_id(tokenizer, END),)
    return Served(frontend_config(folder, vocab_size=size, eos_token_ids=eos, **server))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(checkpoint_of(tmp_path_factory.mktemp("hermes"), HERMES, ())) as served:
        yield served


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = checkpoint_of(tmp_path_factory.mktemp("harmony"), HARMONY, HARMONY_MARKS)
    with serve(folder) as served:
        yield served


def says(served: Served, text: str) -> None:
    """Every answer is `text`, a character or a mark a token, and the end."""
    tokenizer = Tokenizer.from_file(served.config.model.path + "/tokenizer.json")
    ids = [*tokenizer.encode(text).ids, token_id(tokenizer, END)]
    for engine in served.engines:
        engine.script = lambda request: ids


def put_together(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas make; ids aside."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    assert call["type"] == "function" and call["index"] == len(message["calls"])
                    message["calls"].append([function["name"], ""])
                else:
                    assert "name" not in function
                message["calls"][call["index"]][1] += function["arguments"]
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole answer's choice in the same shape."""
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ],
        "finish_reason": choice["finish_reason"],
    }


SHOWN = [
    answer
    for answer in ANSWERS
    if answer.tools == "hermes"
    and not answer.starts_inside
    or (answer.tools is None and answer.reasoning == "qwen3" and not answer.starts_inside)
]


@pytest.mark.parametrize("answer", SHOWN, ids=lambda answer: answer.name)
def test_stream_and_whole_answer_agree(hermes: Served, answer: Answer) -> None:
    says(hermes, answer.raw)
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST}
    (choice,) = hermes.chat(**body)["choices"]
    found = flat(choice)
    assert found["content"] == answer.content
    assert found["reasoning"] == answer.thought
    assert [(name, json.loads(text)) for name, text in found["calls"]] == answer.calls
    assert found["finish_reason"] == ("tool_calls" if answer.calls else "stop")
    assert put_together(hermes.stream(PATH, **body)) == found


def test_openai_client_sees_calls_and_streams_them(hermes: Served) -> None:
    says(hermes, 'Yes.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n')
    with hermes.client() as client:
        found = client.chat.completions.create(model="tiny", messages=USER, tools=TOOL_LIST)
        message = found.choices[0].message
        assert message.tool_calls is not None and message.content == "Yes."
        (call,) = message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        with client.chat.completions.stream(model="tiny", messages=USER, tools=TOOL_LIST) as stream:
            final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls
    assert streamed is not None and final.choices[0].finish_reason == "tool_calls"
    assert streamed[0].function.arguments == call.function.arguments
    assert streamed[0].id != call.id and streamed[0].id.startswith("call_")


def test_deltas_come_one_by_one(hermes: Served) -> None:
    """The name first, then the arguments in pieces, then an empty chunk that ends it."""
    says(hermes, '<tool_call>{"name": "now", "arguments": {"a": "bcd"}}</tool_call>')
    events = hermes.stream(PATH, messages=USER, tools=TOOL_LIST)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (first,) = deltas[1]["tool_calls"]
    assert first["function"] == {"name": "now", "arguments": ""}
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[2:-1]]
    assert len(pieces) > 3 and "".join(pieces) == '{"a": "bcd"}'
    assert deltas[-1] == {}


def test_token_ids_and_logprobs_lose_nothing(hermes: Served) -> None:
    says(hermes, '<think>a</think>b<tool_call>{"name": "now"}</tool_call>')
    body: dict[str, Any] = {
        "messages": USER,
        "tools": TOOL_LIST,
        "return_token_ids": True,
        "logprobs": True,
    }
    (choice,) = hermes.chat(**body)["choices"]
    chunks = [event["choices"][0] for event in hermes.stream(PATH, **body)[:-1]]
    assert sum((chunk["token_ids"] for chunk in chunks[1:]), []) == choice["token_ids"]
    logprobs = [e for c in chunks[1:] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"]


def test_reasoning_tokens_are_counted(hermes: Served) -> None:
    says(hermes, "<think>abc</think>d")
    tokenizer = Tokenizer.from_file(hermes.config.model.path + "/tokenizer.json")
    whole = hermes.chat(messages=USER)
    details = whole["usage"]["completion_tokens_details"]
    # Pieces of text are tokens of their own, whatever they are: those before "d", and the end.
    assert details["reasoning_tokens"] == len(tokenizer.encode("<think>abc</think>").ids)
    assert whole["usage"]["completion_tokens"] == details["reasoning_tokens"] + 2
    events = hermes.stream(PATH, messages=USER, stream_options={"include_usage": True})
    assert events[-2]["usage"] == whole["usage"]


def test_reasoning_can_be_left_out(hermes: Served) -> None:
    says(hermes, "<think>abc</think>d")
    (choice,) = hermes.chat(messages=USER, include_reasoning=False)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "d", "refusal": None}
    found = put_together(hermes.stream(PATH, messages=USER, include_reasoning=False))
    assert found["reasoning"] == "" and found["content"] == "d"


def test_content_is_null_beside_calls_only(hermes: Served) -> None:
    says(hermes, '<tool_call>{"name": "now"}</tool_call>')
    (choice,) = hermes.chat(messages=USER, tools=TOOL_LIST)["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning" not in choice["message"]


def test_a_stop_string_inside_half_a_call_loses_no_text(hermes: Served) -> None:
    says(hermes, 'Well: <tool_call>{"nam STOP e": "now"}')
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST, "stop": ["STOP"]}
    (choice,) = hermes.chat(**body)["choices"]
    assert choice["message"]["content"] == 'Well: <tool_call>{"nam '
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "STOP"
    assert put_together(hermes.stream(PATH, **body)) == flat(choice)


def test_a_call_that_is_cut_short_ends_for_length(hermes: Served) -> None:
    says(hermes, '<tool_call>{"name": "now", "arguments": {"a": "' + "x" * 50)
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST, "max_tokens": 30}
    (choice,) = hermes.chat(**body)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert put_together(hermes.stream(PATH, **body)) == flat(choice)


@pytest.mark.parametrize(
    ("raw", "more", "content", "calls", "reason"),
    [
        # Cut by the client's own stop string, no call is to be made.
        ('W<tool_call>{"name": "now", "arguments": {"a": "x STOP y', {"stop": "STOP"},
         "W", [["now", '{"a": "x ']], "stop"),
        ('<tool_call>{"name": "now", "arguments": {}} STOP', {"stop": "STOP"},
         "", [["now", "{}"]], "tool_calls"),
        ('W<tool_call>{"name": "no', {}, 'W<tool_call>{"name": "no', [], "stop"),
        # Written so by the model itself.
        ('W<tool_call>{"name": "now", "arguments": {"a": [1, {"b"', {},
         "W", [["now", '{"a": [1, {"b"']], "tool_calls"),
        ('<tool_call>{"name": "now"}</tool_call><tool_call>{"na', {},
         '<tool_call>{"na', [["now", "{}"]], "tool_calls"),
        ('<tool_call>{"name": "now"}</tool_call><tool_call>{"na' + "x" * 60, {"max_tokens": 60},
         # Some of the marks and names are one token.
         '<tool_call>{"na' + "x" * 28, [["now", "{}"]], "length"),
    ],
)  # fmt: skip
def test_half_a_call_loses_nothing_and_ends_for_its_own_reason(
    hermes: Served, raw: str, more: dict[str, Any], content: str, calls: Any, reason: str
) -> None:
    says(hermes, raw)
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST, **more}
    (choice,) = hermes.chat(**body)["choices"]
    assert flat(choice) == {
        "content": content,
        "reasoning": "",
        "calls": calls,
        "finish_reason": reason,
    }
    assert put_together(hermes.stream(PATH, **body)) == flat(choice)


def test_without_tools_nothing_is_a_call(hermes: Served) -> None:
    raw = '<tool_call>{"name": "now"}</tool_call>'
    says(hermes, raw)
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": TOOL_LIST, "tool_choice": "none"},
        {"tools": []},
    ]
    for body in bodies:
        (choice,) = hermes.chat(messages=USER, **body)["choices"]
        assert choice["message"]["content"] == raw and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_one_call_where_parallel_ones_are_not_wanted(hermes: Served) -> None:
    says(hermes, '<tool_call>{"name": "now"}</tool_call>' * 2)
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST, "parallel_tool_calls": False}
    (choice,) = hermes.chat(**body)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert put_together(hermes.stream(PATH, **body)) == flat(choice)


def some_of(mode: str, *names: str) -> dict[str, Any]:
    """`tool_choice` among tools by their names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "allowed", "forbidden"),
    [
        ("required", ["get_weather", "now"], []),
        ({"type": "function", "function": {"name": "now"}}, ["now"], ["get_weather"]),
        (some_of("required", "now"), ["now"], ["get_weather"]),
    ],
)
def test_enforced_calls_reach_the_engine_as_a_grammar(
    hermes: Served, choice: Any, allowed: list[str], forbidden: list[str]
) -> None:
    hermes.chat(messages=USER, tools=TOOL_LIST, tool_choice=choice, max_tokens=1)
    grammar = hermes.last_request.params.grammar
    assert grammar is not None
    for name in allowed:
        assert f'\\"name\\": \\"{name}\\"' in json.loads(grammar)["grammars"][1]["lark_grammar"]
    for name in forbidden:
        assert name not in grammar


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
def test_the_model_is_told_of_the_tools_that_it_may_choose_from(
    tmp_path: pathlib.Path, path: str
) -> None:
    template = CHATML + "{# <tool_call> #}{% for tool in tools or [] %}{{ tool }}{% endfor %}"
    choice, tools, said = some_of("auto", "now"), TOOL_LIST, "messages"
    if path == "/v1/responses":
        named = [{"type": "function", "name": "now"}]
        choice, said = {"type": "allowed_tools", "mode": "auto", "tools": named}, "input"
        tools = [{"type": "function", **tool["function"]} for tool in TOOL_LIST]
    with serve(checkpoint_of(tmp_path / "told", template, ())) as served:
        tokenizer = Tokenizer.from_file(served.config.model.path + "/tokenizer.json")
        body = {said: USER, "tools": tools}
        for some, names in ((choice, {"now"}), ("auto", set(TOOLS))):
            response = served.post(path, {**body, "tool_choice": some})
            assert response.status_code == 200, response.text
            prompt = tokenizer.decode(served.last_request.prompt_token_ids)
            assert {name for name in TOOLS if name in prompt} == names
            assert served.last_request.params.grammar is None


def test_auto_is_free(hermes: Served) -> None:
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        hermes.chat(messages=USER, tools=TOOL_LIST, max_tokens=1, **choice)
        assert hermes.last_request.params.grammar is None


def test_strict_tools_bind_calls_that_the_model_is_free_to_make(hermes: Served) -> None:
    parameters = {"type": "object", "properties": {"a": {"const": "only-this"}}}
    strict = {"name": "f", "parameters": parameters, "strict": True}
    tools = [{"type": "function", "function": strict}, TOOL_LIST[0]]
    hermes.chat(messages=USER, tools=tools, max_tokens=1)
    grammar = hermes.last_request.params.grammar
    assert grammar is not None and "only-this" in grammar and "[lazy]" in grammar
    hermes.chat(messages=USER, tools=tools, tool_choice="none", max_tokens=1)
    assert hermes.last_request.params.grammar is None


def test_a_bad_schema_of_a_tool_is_refused_where_it_counts(hermes: Served) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}
    good = {"type": "function", "function": {"name": "g"}}
    body: dict[str, Any] = {"messages": USER, "tools": [good, bad], "tool_choice": "required"}
    for more in ({}, {"response_format": {"type": "json_object"}}):
        response = hermes.post(PATH, {**body, **more})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("the parameters of 'f' (tools[1]) cannot be followed: ")


def test_response_format_leaves_room_for_reasoning_and_calls(hermes: Served) -> None:
    wanted = {"type": "json_object"}
    hermes.chat(messages=USER, response_format=wanted, tools=TOOL_LIST, max_tokens=1)
    grammar = hermes.last_request.params.grammar
    assert grammar is not None
    outer, body, calls = json.loads(grammar)["grammars"]
    assert [part["name"] for part in (outer, body, calls)] == ["outer", "body", "calls"]
    assert "@body | @calls" in outer["lark_grammar"] and "</think>" in outer["lark_grammar"]
    assert body["json_schema"]["type"] == "object"


def test_history_with_calls_and_reasoning_is_taken(hermes: Served) -> None:
    """`tool_calls` may be empty, and content null."""
    says(hermes, "fine")
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"},
    ]
    for assistant in said:
        result = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
        answer = hermes.chat(messages=[*USER, assistant, result], tools=TOOL_LIST)
        assert answer["choices"][0]["message"]["content"] == "fine"


GPT_OSS = [answer for answer in ANSWERS if answer.tools == "openai"]


@pytest.mark.parametrize("answer", GPT_OSS, ids=lambda answer: answer.name)
def test_special_tokens_of_a_format_are_seen_by_its_parser_alone(
    harmony: Served, answer: Answer
) -> None:
    says(harmony, answer.raw)
    body: dict[str, Any] = {"messages": USER, "tools": TOOL_LIST}
    (choice,) = harmony.chat(**body)["choices"]
    found = flat(choice)
    assert found["content"] == answer.content and found["reasoning"] == answer.thought
    assert [(name, json.loads(text)) for name, text in found["calls"]] == answer.calls
    assert put_together(harmony.stream(PATH, **body)) == found


def test_special_tokens_of_a_format_stand_by_id_in_grammars(harmony: Served) -> None:
    tokenizer = Tokenizer.from_file(harmony.config.model.path + "/tokenizer.json")
    channel = token_id(tokenizer, "<|channel|>")
    harmony.chat(messages=USER, tools=TOOL_LIST, tool_choice="required", max_tokens=1)
    grammar = harmony.last_request.params.grammar
    assert grammar is not None and f"<[{channel}]>" in grammar and "<|channel|>" not in grammar


def test_flags_overrule_the_template(tmp_path: pathlib.Path) -> None:
    folder = checkpoint_of(tmp_path, HERMES, ())
    with serve(folder, tool_call_parser="none", reasoning_parser="deepseek_r1") as served:
        says(served, "abc</think>d<tool_call>")
        (choice,) = served.chat(messages=USER, tools=TOOL_LIST)["choices"]
        assert choice["message"]["reasoning"] == "abc"
        assert choice["message"]["content"] == "d<tool_call>"


@pytest.mark.parametrize(
    ("effort", "expected"), [("none", "False|"), ("high", "True|high"), (None, "|")]
)
def test_effort_reaches_the_template(
    tmp_path: pathlib.Path, effort: str | None, expected: str
) -> None:
    folder = checkpoint_of(tmp_path, "{{ enable_thinking }}|{{ reasoning_effort }}", ())
    with serve(folder) as served:
        says(served, "x")
        served.chat(messages=USER, reasoning_effort=effort)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.decode(served.last_request.prompt_token_ids) == expected


TEXT_ARGUMENTS = (
    "{%- for message in messages %}{%- for call in message.tool_calls or [] %}"
    "{{ 'call ' + call['function']['arguments'] }}{%- endfor %}"
    "{{ message['role'] + message['content'] }}{%- endfor %}"
)


def test_templates_that_print_arguments_get_text(tmp_path: pathlib.Path) -> None:
    folder = checkpoint_of(tmp_path, TEXT_ARGUMENTS, ())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with serve(folder) as served:
        says(served, "x")
        for given in ('{"a":  1}', {"a": 1}, None):
            function = {"name": "now", "arguments": given}
            call = {"id": "c", "type": "function", "function": function}
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            served.chat(messages=[*USER, said])
            prompt = tokenizer.decode(served.last_request.prompt_token_ids)
            shown = given if isinstance(given, str) else json.dumps(given or {})
            assert prompt == f"userhicall {shown}assistant"


@pytest.mark.parametrize(
    ("begun", "said", "thought", "content"),
    [
        ("<think>I was", " here</think>ok", "here", "ok"),
        ("<think>done</think>So", " it is", "", " it is"),
        ("So", " it is", "", " it is"),
    ],
)
def test_a_continued_message_goes_on_where_it_was(
    hermes: Served, begun: str, said: str, thought: str, content: str
) -> None:
    says(hermes, said)
    messages = [*USER, {"role": "assistant", "content": begun}]
    answer = hermes.chat(messages=messages, continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert message.get("reasoning", "") == thought
    assert message["content"] == content


def test_the_client_is_told_what_is_not_done_for_its_tools(
    harmony: Served, tmp_path: pathlib.Path
) -> None:
    says(harmony, "<|channel|>final<|message|>x")
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert "strict" in harmony.chat(messages=USER, tools=[strict])["warnings"][0]
    assert "warnings" not in harmony.chat(messages=USER, tools=TOOL_LIST)
    enforced = harmony.chat(messages=USER, tools=[strict], tool_choice="required", max_tokens=1)
    assert "warnings" not in enforced
    with serve(checkpoint_of(tmp_path, CHATML, ())) as served:
        says(served, "x")
        (warning,) = served.chat(messages=USER, tools=TOOL_LIST)["warnings"]
        assert "as text" in warning
        assert served.stream(PATH, messages=USER, tools=TOOL_LIST)[0]["warnings"] == [warning]


ALTERNATING = (
    "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{%- endif %}"
    "{{ message.role }}: {{ message.content }}\n{%- endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages"])
def test_what_a_template_refuses_is_told_in_its_words(
    tmp_path: pathlib.Path, path: str, stream: bool
) -> None:
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    name = "input" if path == "/v1/responses" else "messages"
    limit = {"max_tokens": 2} if path == "/v1/messages" else {}
    with serve(checkpoint_of(tmp_path / "alternating", ALTERNATING, ())) as served:
        for conversation in ([user, user], [assistant], [user, assistant, assistant]):
            body = {name: conversation, "stream": stream, **limit}
            response = served.post(path, body)
            assert response.status_code == 400, response.text
            assert "roles must alternate user/assistant" in response.json()["error"]["message"]
        assert served.post(path, {name: [user], **limit}).status_code == 200
