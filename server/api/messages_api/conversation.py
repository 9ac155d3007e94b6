"""From a body of Anthropic's protocol to a chat's."""

import json
from typing import Any

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.errors import InvalidRequest, UnsupportedParameter
from moed.server.api.messages_api.body import (
    TEXT_ONLY,
    CountBody,
    MessageParam,
    MessagesBody,
    Text,
    ToolParam,
)
from moed.server.api.translation import chat_body, joined_text

# What only Anthropic's own servers do.
REMOTE = ("mcp_servers", "container")


def to_chat(body: CountBody) -> ChatBody:
    """Raises `InvalidRequest` for what this server cannot do."""
    extras = body.unknown_fields()
    if not isinstance(body, MessagesBody):
        # Counting needs none of them.
        extras = {k: v for k, v in extras.items() if k not in MessagesBody.model_fields}
    for name in REMOTE:
        if extras.pop(name, None):
            raise UnsupportedParameter(f"{name} is not supported by this server", param=name)
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{index}].content", names)
    translated: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": _is_prefilled(body.messages[-1]) or None,
        "tools": [_tool(tool, index) for index, tool in enumerate(body.tools or [])] or None,
        **_tool_choice(body),
        **_output(body),
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        translated["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesBody):
        translated |= {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
        }
    chat = chat_body(translated, _with_thinking(body, extras))
    if isinstance(body, MessagesBody) and body.stop_sequences:
        chat.stop = [*chat.stop, *body.stop_sequences]
    return chat


def _chat_messages(
    message: MessageParam, param: str, names: dict[str, str]
) -> list[dict[str, Any]]:
    """`names`: of the tools by the ids of their calls, so far; more are added."""
    content = message.content
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    if message.role == "assistant":
        return [_assistant(content, param, names)]
    if message.role == "system":
        return [{"role": "system", "content": _text(content, param)}]
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        where = f"{param}[{index}]"
        if block["type"] != "tool_result":
            texts.append(_block_text(block, where))
            continue
        if texts:
            found.append({"role": "user", "content": joined_text(texts)})
            texts = []
        found.append(_tool_result(block, where, names))
    if texts or not found:
        found.append({"role": "user", "content": joined_text(texts)})
    return found


def _tool_result(block: dict[str, Any], param: str, names: dict[str, str]) -> dict[str, Any]:
    call_id = _string(block, "tool_use_id", param)
    content = block.get("content")
    if content is None:
        content = ""
    text = _text(_checked(content, f"{param}.content"), f"{param}.content")
    if block.get("is_error") and not text:
        text = "error"
    result = {"role": "tool", "tool_call_id": call_id, "content": text}
    return {**result, "name": names[call_id]} if call_id in names else result


def _assistant(content: list[dict[str, Any]], param: str, names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{param}[{index}]"
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                continue  # another server's, and nobody else can read it
            case "tool_use":
                call_id, name = _string(block, "id", where), _string(block, "name", where)
                given = block.get("input", {})
                if not isinstance(given, dict):
                    raise _invalid(f"{where}.input", "must be an object")
                names[call_id] = name
                try:
                    arguments = json.dumps(given, ensure_ascii=False)
                except RecursionError:
                    raise _invalid(f"{where}.input", "is nested too deeply") from None
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                texts.append(_block_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": joined_text(texts)}
    if thoughts:
        message["reasoning_content"] = joined_text(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _is_prefilled(last: MessageParam) -> bool:
    """The answer goes on where the client's last message ends. Raises `InvalidRequest`."""
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(b["type"] == "tool_use" for b in last.content):
        raise _invalid("messages", "end with a tool_use that has no tool_result")
    return True


def _tool(tool: ToolParam, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"tools[{index}] is of type {tool.type[:60]!r}, which runs on Anthropic's own servers; "
            "this server knows tools of type 'custom'",
            param=f"tools[{index}].type",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def _tool_choice(body: CountBody) -> dict[str, Any]:
    given = body.tool_choice
    if given is None:
        return {}
    choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(given.type)
    if choice is None:
        if not given.name:
            raise _invalid("tool_choice.name", "is missing: type 'tool' needs it")
        choice = {"type": "function", "function": {"name": given.name}}
    several = None if given.disable_parallel_tool_use is None else False
    if given.disable_parallel_tool_use is False:
        several = True
    return {"tool_choice": choice, "parallel_tool_calls": several}


def _output(body: CountBody) -> dict[str, Any]:
    given: dict[str, Any] = {}
    config = body.output_config
    if config is not None and config.effort is not None:
        given["reasoning_effort"] = config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        given["reasoning_effort"] = "none"
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    return given


def _with_thinking(body: CountBody, extras: dict[str, Any]) -> dict[str, Any]:
    """Templates know one of these variables; what the client sets itself comes first."""
    if body.thinking is None or body.thinking.type != "enabled":
        return extras
    own = extras.get("chat_template_kwargs")
    switches: dict[str, Any] = {"enable_thinking": True, "thinking": True}
    if own is not None and not isinstance(own, dict):
        return extras
    return {**extras, "chat_template_kwargs": {**switches, **(own or {})}}


def _text(content: Text, param: str) -> str:
    if isinstance(content, str):
        return content
    return joined_text([_block_text(b, f"{param}[{i}]") for i, b in enumerate(content)])


def _checked(content: Any, param: str) -> Text:
    is_list = isinstance(content, list)
    if is_list and all(isinstance(b, dict) and isinstance(b.get("type"), str) for b in content):
        return list(content)
    if isinstance(content, str):
        return content
    raise _invalid(param, "must be a string or an array of blocks that name their type")


def _block_text(block: dict[str, Any], param: str) -> str:
    if block["type"] != "text":
        kind = block["type"][:60]
        raise _invalid(param, f"is of type {kind!r}, which cannot be here: {TEXT_ONLY}")
    return _string(block, "text", param)


def _string(block: dict[str, Any], key: str, param: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _invalid(f"{param}.{key}", "must be a string")
    return value


def _invalid(param: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {complaint}", param=param, code="invalid_value")
