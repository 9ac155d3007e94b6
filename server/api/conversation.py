"""From the messages of a chat to its prompt: what the chat template is given, and what it makes."""

import asyncio
import json
from typing import Any

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.bodies.conversation import Message, Tool
from moed.server.api.completions import check_length
from moed.server.api.errors import InvalidRequest
from moed.server.api.generation import PromptTokens, encode_all
from moed.server.api.state import AppState
from moed.server.chat_template import TemplateFailed

# Longer conversations are rendered in a thread, so that other requests go on meanwhile.
MAX_INLINE_MESSAGES = 32


def template_options(body: ChatBody) -> dict[str, Any]:
    """Variables of the chat template that the request sets."""
    options: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        # Templates know one of these.
        is_on = body.reasoning_effort != "none"
        options = {"enable_thinking": is_on, "thinking": is_on}
        if is_on:
            options["reasoning_effort"] = body.reasoning_effort
    return {**options, **(body.chat_template_kwargs or {})}


async def render(
    state: AppState,
    messages: list[Message],
    tools: list[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    options: dict[str, Any],
) -> str:
    """The prompt text of a conversation. Raises `InvalidRequest` or `TemplateFailed`."""
    template = state.tools.chat_template
    if template is None:
        raise InvalidRequest(
            "this checkpoint has no chat template: use /v1/completions",
            code="chat_template_missing",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message

    def work() -> str:
        return template.render(
            [template_message(message, template.wants_text_arguments) for message in messages],
            [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
        )

    if len(messages) <= MAX_INLINE_MESSAGES:
        return work()
    return await asyncio.to_thread(work)


def template_message(message: Message, wants_text: bool) -> dict[str, Any]:
    """A message as templates expect it: no null fields, and tool arguments as objects (or
    `wants_text`: as JSON text).
    """
    plain = message.model_dump(exclude_unset=True, exclude={"tool_calls"})
    plain = {key: value for key, value in plain.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = calls = []
        for call in message.tool_calls:
            entry = call.model_dump(exclude_unset=True)
            given = call.function.arguments
            entry["function"]["arguments"] = _text(given) if wants_text else _object(given)
            calls.append(entry)
    # Some templates print a null, others fail without any.
    return {"content": "", **plain}


def _object(given: str | dict[str, Any] | None) -> Any:
    """OpenAI's clients send them as JSON text; templates print objects."""
    if not isinstance(given, str):
        return given or {}
    if not given.strip():
        return {}
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _text(given: str | dict[str, Any] | None) -> str:
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


async def tokenize_conversation(
    text: str, add_special: bool, state: AppState, is_limited: bool = True
) -> PromptTokens:
    """`is_limited` False: it will be cut. Raises `ContextLengthExceeded`, or `TemplateFailed` when
    nothing is left to answer.
    """
    if is_limited:
        check_length(text, "messages", state)
    (token_ids,) = await encode_all(state, [text], add_special)
    if not token_ids:
        raise TemplateFailed("it made an empty prompt of it")
    return PromptTokens(token_ids)
