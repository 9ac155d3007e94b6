"""Whether a parser reads the calls that the chat template itself writes: tried once, at start."""

import json
from typing import Any

from moed.server.chat_template import ChatTemplate, TemplateFailed
from moed.server.parsers.events import ToolArguments, ToolStart
from moed.server.parsers.output_parser import OutputParser, ParserOptions
from moed.server.parsers.registry import ToolFormat
from moed.server.parsers.typed_values import ToolTypes

QUESTION = "THE-QUESTION"
NAME = "look_up"
ARGUMENTS: dict[str, Any] = {"text": 'a "b"', "number": 3}
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
}
# Some templates print the id, and others refuse all that are longer.
CALL_IDS = ("functions.look_up:0", "call00001")


def reads_back(template: ChatTemplate, form: ToolFormat) -> bool:
    """False when a call gets lost between the two; True also where it cannot be tried."""
    answers = (_answer(template, call_id) for call_id in CALL_IDS)
    answer = next(filter(None, answers), "")
    if form.is_whole_answer or NAME not in answer:
        return True
    types = ToolTypes({NAME: PARAMETERS["properties"]})  # type: ignore[dict-item]
    parser = OutputParser(ParserOptions(form, None, types=types))
    events = [*parser.feed(answer), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolStart)]
    arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
    try:
        return names == [NAME] and json.loads(arguments) == ARGUMENTS
    except ValueError:
        return False


def _answer(template: ChatTemplate, call_id: str) -> str:
    """What the template makes of an answer with a call; empty when it refuses it."""
    arguments = json.dumps(ARGUMENTS) if template.wants_text_arguments else ARGUMENTS
    function = {"name": NAME, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    try:
        text = template.render(
            [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
            [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}],
            add_generation_prompt=False,
            continue_final_message=False,
            options={},
        )
    except TemplateFailed:
        return ""
    return text.rpartition(QUESTION)[2]
