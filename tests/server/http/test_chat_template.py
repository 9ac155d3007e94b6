"""Templates render as transformers renders them, and their errors are the client's to read."""

import json
import pathlib
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from moed.config.errors import ModelError
from moed.server.api.bodies.conversation import Message
from moed.server.api.conversation import template_message
from moed.server.chat_template import ChatTemplate, TemplateFailed
from tests.server.http.checkpoints import byte_level_tokenizer, write_checkpoint

# qwen3_like: tools in the system message, calls in tags, thinking in between, answers of tools
# grouped into one user message, a namespace and a reversed scan. mixtral_like: strict alternation,
# special tokens by name. helpers: indentation, loop controls, dates, escaping left alone.
FOLDER = pathlib.Path(__file__).parent / "templates"
TEMPLATES = {
    name: (FOLDER / f"{name}.jinja").read_text()
    for name in ("qwen3_like", "mixtral_like", "helpers")
}

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": "<&é>"}},
}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2? <b>&"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "שלום 👋"},
]
WITH_TOOLS = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "reasoning_content": "I must add.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is 3.", "reasoning": "The tool said so."},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add <two> numbers & more",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def load(folder: pathlib.Path, template: Any, **config: Any) -> ChatTemplate:
    write_checkpoint(folder, byte_level_tokenizer(), chat_template=template, **SPECIAL, **config)
    found = ChatTemplate.load(str(folder))
    assert found is not None
    return found


def ours(template: ChatTemplate, messages: Any, tools: Any, **options: Any) -> str:
    return template.render(
        messages,
        tools,
        add_generation_prompt=options.pop("add_generation_prompt", False),
        continue_final_message=options.pop("continue_final_message", False),
        options=options,
    )


def theirs(folder: pathlib.Path, messages: Any, tools: Any, **options: Any) -> str:
    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    text: str = oracle.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return text


CASES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("qwen3_like", PLAIN, None, {}),
    ("qwen3_like", PLAIN, None, {"add_generation_prompt": True}),
    ("qwen3_like", PLAIN, None, {"add_generation_prompt": True, "enable_thinking": False}),
    ("qwen3_like", PLAIN, TOOLS, {"add_generation_prompt": True}),
    ("qwen3_like", WITH_TOOLS, TOOLS, {"add_generation_prompt": True}),
    ("qwen3_like", WITH_TOOLS[:5], TOOLS, {}),
    ("qwen3_like", PLAIN[:3], None, {"continue_final_message": True}),
    ("mixtral_like", PLAIN, None, {}),
    ("mixtral_like", PLAIN[1:], None, {"add_generation_prompt": True}),
    ("mixtral_like", PLAIN[:3], None, {"continue_final_message": True}),
    ("helpers", WITH_TOOLS, TOOLS, {}),
    ("helpers", PLAIN, None, {}),
]


@pytest.mark.parametrize(("name", "messages", "tools", "options"), CASES)
def test_equals_transformers(
    tmp_path: pathlib.Path, name: str, messages: Any, tools: Any, options: dict[str, Any]
) -> None:
    template = load(tmp_path, TEMPLATES[name])
    assert ours(template, messages, tools, **options) == theirs(
        tmp_path, messages, tools, **options
    )


def test_template_of_the_checkpoint_may_be_a_list_with_one_for_tools(
    tmp_path: pathlib.Path,
) -> None:
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    template = load(tmp_path, named)
    for tools in (None, TOOLS):
        assert ours(template, PLAIN, tools) == theirs(tmp_path, PLAIN, tools)


def test_file_of_its_own_comes_before_the_tokenizers_config(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, byte_level_tokenizer(), chat_template="old", **SPECIAL)
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    assert ours(template, PLAIN, None) == theirs(tmp_path, PLAIN, None) == "new Be brief."


def test_checkpoint_without_a_template(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, byte_level_tokenizer())
    assert ChatTemplate.load(str(tmp_path)) is None


def test_template_that_does_not_compile_is_the_checkpoints_fault(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        load(tmp_path, "{% for %}")


def test_special_tokens_written_as_objects(tmp_path: pathlib.Path) -> None:
    template = ChatTemplate({"default": "{{ bos_token }}|{{ eos_token }}"}, SPECIAL)
    assert ours(template, PLAIN, None) == "<s>|</s>"
    write_checkpoint(
        tmp_path,
        byte_level_tokenizer(),
        chat_template="{{ bos_token }}",
        bos_token={"content": "<bos>", "special": True},
    )
    loaded = ChatTemplate.load(str(tmp_path))
    assert loaded is not None and ours(loaded, PLAIN, None) == "<bos>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([PLAIN[1], PLAIN[1]], "must alternate"),
        ([PLAIN[2]], "must alternate"),
        ([PLAIN[1], {"role": "tool", "content": "x"}], "Only user and assistant"),
        ([{"role": "user", "content": {"a": 1}}], "can only concatenate str"),
    ],
)
def test_refusal_comes_in_the_templates_own_words(messages: Any, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words):
        ours(ChatTemplate({"default": TEMPLATES["mixtral_like"]}, SPECIAL), messages, None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_sandbox_holds(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    try:
        text = ours(template, PLAIN, None)
    except TemplateFailed:
        return
    # An unsafe attribute is undefined, which prints as nothing.
    assert text == ""


def test_options_cannot_hide_what_the_server_passes() -> None:
    template = ChatTemplate({"default": "{{ messages | length }} {{ add_generation_prompt }}"}, {})
    text = template.render(
        PLAIN,
        None,
        add_generation_prompt=True,
        continue_final_message=False,
        options={"messages": [], "add_generation_prompt": False},
    )
    assert text == "4 True"


def test_deep_nesting_is_a_refusal_and_no_crash() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    template = ChatTemplate({"default": "{{ messages | tojson }}"}, {})
    with pytest.raises(TemplateFailed, match="nested"):
        ours(template, [{"role": "user", "content": deep}], None)


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    prepared = template_message(message, wants_text=False)
    assert prepared["content"] == ""
    assert prepared["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    for text, expected in (("", {}), ("not json", "not json")):
        call["function"] = {"name": "f", "arguments": text}
        message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
        found = template_message(message, wants_text=False)["tool_calls"][0]["function"][
            "arguments"
        ]
        assert json.dumps(found) == json.dumps(expected)


# As published templates look at earlier answers.
ANSWER_LOOKS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if 'tool_calls' in m and m['tool_calls'] is not none %}"
    "{{ m['tool_calls'][0]['function']['name'] }}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("source", ANSWER_LOOKS)
@pytest.mark.parametrize(
    "answer",
    [
        {"content": "x", "tool_calls": []},
        {"content": None, "tool_calls": []},
        {"content": "x", "tool_calls": None},
        {"content": None},
        {},
    ],
)
def test_earlier_answers_without_text_or_calls_break_no_template(
    source: str, answer: dict[str, Any]
) -> None:
    message = Message.model_validate({"role": "assistant", **answer})
    template = ChatTemplate({"default": source}, {})
    prepared = [template_message(message, wants_text=False)]
    assert isinstance(ours(template, prepared, None), str)


def test_continuing_needs_a_final_message_that_is_shown() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(TemplateFailed, match="drops the final message"):
        ours(template, PLAIN[:3], None, continue_final_message=True)
    with pytest.raises(TemplateFailed, match="text content"):
        ours(template, [{"role": "assistant"}], None, continue_final_message=True)


# One feature of published templates each.
FEATURES = {
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}\n"
        "{% set said = m.content %}{{ said }}{% endgeneration %}]"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}{{ {'b': 1.0, 'a': none, 'c': [true, 'é<&>']} | tojson }}"
        "{{ {'b': 1, 'a': {'d': 2}} | tojson(indent=4, sort_keys=true) }}"
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ {1: 2} | tojson }}"
    ),
    "date": "{{ strftime_now('%d %b %Y') }}{% if strftime_now is defined %}!{% endif %}",
    "tools": (
        "{% if tools is not none and tools %}{% for tool in tools %}{% set f = tool.function %}"
        "{{ loop.index0 }} {{ f.name | upper }}"
        "{% for key, value in f.parameters.properties.items() %}"
        " {{ key }}:{{ value.type | default('any') }}{% endfor %}{% endfor %}{% else %}-{% endif %}"
    ),
    "prompt": "{{ messages[-1].content | trim }}{% if add_generation_prompt %}<|go|>{% endif %}",
    "macro": (
        "{% macro show(m, depth=0) -%}{{ '  ' * depth }}{{ m['role'] }}: {{ m['content'] }}\n"
        "{%- endmacro %}{% set ns = namespace(seen=false) %}{% for m in messages[::-1] %}"
        "{% if not ns.seen and m.role == 'user' %}{% set ns.seen = true %}{{ show(m, 2) }}"
        "{% endif %}{% endfor %}"
    ),
    "spaces": "  {%- for m in messages %}\n    {{- m.role }}\n  {% endfor +%}\n  {# note #}\n end",
    "missing": "{{ messages[0].absent }}|{{ absent }}|{{ 'x' if absent is defined else 'y' }}",
    "text": (
        "{{ messages[1].content.split('?')[0].strip('W') }}{{ messages[0].content | length }}"
        "{{ messages[0].content.startswith('Be') }}"
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    ),
}


@pytest.mark.parametrize("feature", sorted(FEATURES))
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_features_equal_transformers(tmp_path: pathlib.Path, feature: str, tools: Any) -> None:
    template = load(tmp_path, FEATURES[feature])
    for options in ({}, {"add_generation_prompt": True}):
        found = ours(template, PLAIN, tools, **options)
        assert found == theirs(tmp_path, PLAIN, tools, **options)
        assert found


@pytest.mark.parametrize("last", ["3", "  The answer", "It is ", "x\n\n", "3 3 3"])
@pytest.mark.parametrize(
    "around", ["{{ m.content }}", "<{{ m.content | trim }}>", "{{ m.role }}\n{{ m.content }}</s>\n"]
)
def test_continued_messages_equal_transformers(
    tmp_path: pathlib.Path, around: str, last: str
) -> None:
    template = load(tmp_path, "{% for m in messages %}" + around + "{% endfor %}")
    messages = [*PLAIN[:2], {"role": "assistant", "content": last}]
    options = {"continue_final_message": True}
    assert ours(template, messages, None, **options) == theirs(tmp_path, messages, None, **options)


def test_refusals_carry_the_words_that_transformers_gives(tmp_path: pathlib.Path) -> None:
    template = load(tmp_path, "{{ raise_exception('No ' ~ messages[0].role ~ ', please') }}")
    with pytest.raises(TemplateFailed) as ours_failed:
        ours(template, PLAIN, None)
    with pytest.raises(Exception) as theirs_failed:  # noqa: B017 (jinja2's own)
        theirs(tmp_path, PLAIN, None)
    assert str(ours_failed.value) == str(theirs_failed.value) == "No system, please"


def test_templates_in_files_of_their_own(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, byte_level_tokenizer(), **SPECIAL)
    (tmp_path / "chat_template.jinja").write_text("plain {{ messages[0].content }}\n")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}")
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    for tools in (None, TOOLS):
        assert ours(template, PLAIN, tools) == theirs(tmp_path, PLAIN, tools)
