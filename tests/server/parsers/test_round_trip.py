"""A template's own calls, read back: our templates in the manner of each family's."""

import pytest

from moed.server.chat_template import ChatTemplate
from moed.server.parsers.registry import TOOL_FORMATS, tool_format
from moed.server.tool_round_trip import reads_back

BEFORE = (
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{%- set function = call.function %}"
)
AFTER = "{%- endfor %}</s>{%- endfor %}"
JSON = "{{ function.arguments | tojson }}"
EACH = "{%- for key, value in function.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ function.name }}", "arguments": '
    + JSON
    + "}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ function.name }}>\n"
    + EACH
    + "{{ '<parameter=' + key + '>\n' }}"
    + VALUE
    + "{{ '\n</parameter>\n' }}{%- endfor %}</function>\n</tool_call>",
    "glm45": "<tool_call>{{ function.name }}\n"
    + EACH
    + "<arg_key>{{ key }}</arg_key>\n<arg_value>"
    + VALUE
    + "</arg_value>\n{%- endfor %}</tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ function.name }}<｜tool▁sep｜>"
    "{{ '' + function.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ function.name }}\n```json\n{{ '' + function.arguments }}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ function.name }}">\n'
    + EACH
    + '<parameter name="{{ key }}">'
    + VALUE
    + "</parameter>\n{%- endfor %}</invoke>\n</minimax:tool_call>",
    "mistral": "{%- if call.id | length != 9 %}{{ raise_exception('ids have 9') }}{%- endif %}"
    '[TOOL_CALLS][{"name": "{{ function.name }}", "arguments": ' + JSON + "}]",
    "openai": "<|start|>assistant to=functions.{{ function.name }}<|channel|>commentary json"
    "<|message|>" + JSON + "<|call|>",
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_template_are_read_back(name: str) -> None:
    template = ChatTemplate({"default": BEFORE + CALLS[name] + AFTER}, {})
    form = tool_format("auto", template.source)
    assert form is not None and form.name == name
    assert reads_back(template, form)
    for other in ("hermes", "mistral", "kimi_k2"):
        if other != name:
            assert not reads_back(template, TOOL_FORMATS[other]), other


def test_a_template_without_calls_proves_nothing() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    assert reads_back(template, TOOL_FORMATS["hermes"])
