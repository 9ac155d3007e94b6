"""A chat's answer in Anthropic's protocol, whole and as events."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from moed.server.api.blocks import Block, Blocks, Change, Closed, Grown, Kind, Opened
from moed.server.api.chat import ChatGeneration
from moed.server.api.errors import ApiError, messages_envelope
from moed.server.api.event_stream import named_event
from moed.server.api.generation import Generation

# Of a call whose arguments are no JSON object: all that the model wrote, so that nothing is lost.
RAW_ARGUMENTS = "raw_arguments"


def whole_message(generation: Generation) -> Response:
    assert isinstance(generation, ChatGeneration)
    (choice,), (output,) = generation.choices, generation.outputs
    blocks = Blocks(output)
    for number, piece in enumerate(choice.pieces, 1):
        for _ in blocks.changes(piece, is_last=number == len(choice.pieces)):
            pass
    answer = {
        **_message(generation),
        "content": [_content(block) for block in blocks.all],
        **_ending(generation),
        "usage": _usage(generation),
    }
    if generation.ignored.warnings:
        answer["warnings"] = generation.ignored.warnings
    return Response(
        msgspec.json.encode(answer),
        headers=generation.ignored.headers,
        media_type="application/json",
    )


async def stream_message(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The message without content, its blocks one after the other, and how it ended."""
    assert isinstance(generation, ChatGeneration)
    (choice,), (output,) = generation.choices, generation.outputs
    blocks = Blocks(output)
    pieces = generation.pieces()
    try:
        start = {**_message(generation), "usage": _usage(generation)}
        yield _event("message_start", message=start)
        yield _event("ping")
        async for ready in pieces:
            events = [
                event
                for change in blocks.all_changes(ready, choice.text)
                for event in _events(change)
            ]
            yield b"".join(events)
        yield _event("message_delta", delta=_ending(generation), usage=_usage(generation))
        yield _event("message_stop")
    finally:
        await pieces.aclose()


def message_error(error: ApiError, request_id: str | None) -> bytes:
    return b"event: error\ndata: " + messages_envelope(error, request_id) + b"\n\n"


def _event(kind: str, **body: Any) -> bytes:
    return named_event(kind, {"type": kind, **body})


def _events(change: Change) -> Iterator[bytes]:
    index = change.block.index
    match change:
        case Opened(block):
            yield _event("content_block_start", index=index, content_block=_opening(block))
        case Grown(block, text):
            yield _event("content_block_delta", index=index, delta=_delta(block, text))
        case Closed():
            yield _event("content_block_stop", index=index)


def _opening(block: Block) -> dict[str, Any]:
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case Kind.REASONING:
            return {**_opening(block), "thinking": block.text}
        case Kind.TEXT:
            return {**_opening(block), "text": block.text}
        case Kind.CALL:
            return {**_opening(block), "input": _input(block.text)}


def _input(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: text}


def _message(generation: ChatGeneration) -> dict[str, Any]:
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(generation: ChatGeneration) -> dict[str, Any]:
    text = generation.choices[0].text
    reason = generation.outputs[0].finish_reason
    if isinstance(text.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": text.stop_reason}
    if reason == "abort":
        # The protocol has no word for it; this one says that there was more to come.
        named = "max_tokens"
    elif reason == "length":
        most = generation.body.max_tokens
        is_whole = most is None or text.num_tokens >= most
        named = "max_tokens" if is_whole else "model_context_window_exceeded"
    else:
        named = "tool_use" if reason == "tool_calls" else "end_turn"
    return {"stop_reason": named, "stop_sequence": None}


def _usage(generation: ChatGeneration) -> dict[str, int]:
    """So far. Input tokens are those that no cache held; this server writes none on request."""
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
