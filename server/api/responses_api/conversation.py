"""From a body of `/v1/responses`, and what came before it, to a chat's."""

from collections.abc import Sequence
from typing import Any

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.errors import InvalidRequest, UnsupportedParameter
from moed.server.api.responses_api.body import FunctionTool, Input, InputBody, ResponsesBody
from moed.server.api.translation import chat_body, joined_text

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
# What only OpenAI's own servers do, and what this one does not return; by the values that pass.
OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "context_management": (None, []),
}
INCLUDED = ("reasoning.encrypted_content",)
"""Agents ask for it as a matter of course; reasoning is sent in plain text here."""


def items_of(given: Input) -> list[Item]:
    """Input as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def to_chat(body: InputBody, history: Sequence[Item]) -> ChatBody:
    """`history`: items before the body's own. Raises `InvalidRequest`."""
    extras = body.unknown_fields()
    if not isinstance(body, ResponsesBody):
        # Counting needs none of them.
        extras = {k: v for k, v in extras.items() if k not in ResponsesBody.model_fields}
    for name, passing in OFF_VALUES.items():
        value = extras.pop(name) if name in extras else getattr(body, name, None)
        if value not in passing:
            raise UnsupportedParameter(
                f"{name} is not supported by this server with the value that was given; leave it "
                "out",
                param=name,
            )
    messages: list[Item] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    own = items_of(body.input)
    messages += _chat_messages([*history, *own], len(history))
    tools = [_tool(tool, index) for index, tool in enumerate(body.tools or [])]
    translated: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _response_format(body),
    }
    if isinstance(body, ResponsesBody):
        _check_include(body.include or [])
        translated |= {
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
        }
    return chat_body(translated, extras)


def _check_include(names: list[str]) -> None:
    for name in names:
        if name not in INCLUDED:
            raise UnsupportedParameter(
                f"include names {name[:100]!r}, which this server cannot give; it knows "
                f"{', '.join(INCLUDED)}",
                param="include",
            )


def _chat_messages(items: Sequence[Item], num_before: int) -> list[Item]:
    """What an assistant thought, said and called in a row is one message of a chat. Errors name
    items by their place in the input, behind `num_before` earlier ones.
    """
    messages: list[Item] = []
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        param = f"input[{index - num_before}]"
        kind = item.get("type", "message")
        match kind:
            case "message":
                _add_message(messages, item, param)
            case "reasoning":
                text = _reasoning(item, param)
                message = _assistant(messages, "content", "tool_calls")
                earlier = message.get("reasoning_content")
                message["reasoning_content"] = joined_text([earlier, text] if earlier else [text])
            case "function_call":
                call_id, name = _string(item, "call_id", param), _string(item, "name", param)
                names[call_id] = name
                function = {"name": name, "arguments": _string(item, "arguments", param)}
                call = {"id": call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _string(item, "call_id", param)
                text = _text(item.get("output"), f"{param}.output")
                message = {"role": "tool", "tool_call_id": call_id, "content": text}
                if call_id in names:
                    message["name"] = names[call_id]
                messages.append(message)
            case _:
                raise _invalid(
                    f"{param}.type",
                    f"is {str(kind)[:60]!r}; this server knows message, reasoning, function_call "
                    "and function_call_output",
                )
    return messages


def _add_message(messages: list[Item], item: Item, param: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _invalid(f"{param}.role", "must be 'user', 'assistant', 'system' or 'developer'")
    text = _text(item.get("content"), f"{param}.content")
    if role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _assistant(messages: list[Item], *ends: str) -> Item:
    """The assistant's message to add to: a new one after another role, or after one of `ends`."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(key in last for key in ends):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(item: Item, param: str) -> str:
    """The text itself, or where there is none its summary."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if parts:
            return _text(parts, f"{param}.{key}")
    return ""


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(param, "must be a string or an array of parts")
    texts = []
    for index, part in enumerate(content):
        where = f"{param}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise _invalid(
                where,
                "must be a part of type 'input_text' or 'output_text': this model reads nothing "
                "but text",
            )
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", where))
    return joined_text(texts)


def _tool(tool: FunctionTool, index: int) -> Item:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"tools[{index}] is of type {tool.type[:60]!r}; this server knows tools of type "
            "'function'",
            param=f"tools[{index}].type",
        )
    if not tool.name:
        raise _invalid(f"tools[{index}].name", "is missing")
    function = tool.model_dump(include={"name", "description", "parameters", "strict"})
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def _tool_choice(given: str | Item | None) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools" and isinstance(given.get("tools"), list):
        tools = [_named(tool) for tool in given["tools"]]
        allowed = {"mode": given.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _named(given)


def _named(given: Any) -> Item:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise UnsupportedParameter(
            "tool_choice must be 'none', 'auto', 'required', a function by its name, or "
            "'allowed_tools' with a list of those",
            param="tool_choice",
        )
    name = _string(given, "name", "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _response_format(body: InputBody) -> Item | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    for param, value in (("name", form.name), ("schema", form.schema_)):
        if value is None:
            raise _invalid(f"text.format.{param}", "is missing: type 'json_schema' needs it")
    schema = {"name": form.name, "schema": form.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _string(item: Item, key: str, param: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _invalid(f"{param}.{key}", "must be a string")
    return value


def _invalid(param: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {complaint}", param=param, code="invalid_value")
