"""A chat's answer as a response with output items, whole and as events."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from moed.server.api.blocks import Block, Blocks, Change, Closed, Grown, Kind, Opened
from moed.server.api.chat import ChatGeneration
from moed.server.api.errors import ApiError
from moed.server.api.event_stream import named_event, streamed_error
from moed.server.api.generation import Generation
from moed.server.api.responses_api.body import ResponsesBody
from moed.server.api.responses_api.conversation import items_of
from moed.server.api.responses_api.store import Stored

Item = dict[str, Any]
Keep = Callable[[str, Stored], None]
ID_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class ResponseAnswer:
    """One request's answer. It is stored when it has ended, and was asked to be kept."""

    def __init__(self, body: ResponsesBody, history: Sequence[Item], keep: Keep) -> None:
        """`history`: items before the body's own."""
        self._body = body
        self._history = history
        self._keep = keep
        self._num_events = 0

    def whole(self, generation: Generation) -> Response:
        assert isinstance(generation, ChatGeneration)
        (choice,), (output,) = generation.choices, generation.outputs
        blocks = Blocks(output)
        for number, piece in enumerate(choice.pieces, 1):
            for _ in blocks.changes(piece, is_last=number == len(choice.pieces)):
                pass
        answer = self._ended(generation, blocks)
        if generation.ignored.warnings:
            answer["warnings"] = generation.ignored.warnings
        return Response(
            msgspec.json.encode(answer),
            headers=generation.ignored.headers,
            media_type="application/json",
        )

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The response as it begins, its items one after the other, and the whole of it."""
        assert isinstance(generation, ChatGeneration)
        (choice,), (output,) = generation.choices, generation.outputs
        blocks = Blocks(output)
        begun = self._response(generation, "in_progress", [])
        pieces = generation.pieces()
        try:
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            async for ready in pieces:
                events = [
                    event
                    for change in blocks.all_changes(ready, choice.text)
                    for event in self._changed(generation, change)
                ]
                yield b"".join(events)
            answer = self._ended(generation, blocks)
            yield self._event(f"response.{answer['status']}", response=answer)
        except Exception as error:
            told = streamed_error(error)
            items = [_item(generation.id, block, "incomplete") for block in blocks.all]
            failed = self._response(generation, "failed", items)
            failed["error"] = {"code": "server_error", "message": told.message}
            yield self._event("response.failed", response=failed)
            raise told from error
        finally:
            await pieces.aclose()

    def error_event(self, error: ApiError) -> bytes:
        """Clients look for its parts, or for an object called error."""
        parts = {"message": error.message, "code": error.code, "param": error.param}
        return self._event("error", **parts, error={**parts, "type": error.type})

    def _event(self, kind: str, **body: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event(kind, {"type": kind, "sequence_number": number, **body})

    def _changed(self, generation: ChatGeneration, change: Change) -> Iterator[bytes]:
        block = change.block
        item_id = _item_id(generation.id, block)
        place: Item = {"output_index": block.index}
        inside: Item = {**place, "item_id": item_id}
        if block.kind is not Kind.CALL:
            inside["content_index"] = 0
        extra: Item = {"logprobs": []} if block.kind is Kind.TEXT else {}
        stem, field = TEXT_EVENTS[block.kind]
        match change:
            case Opened():
                item = _item(generation.id, block, "in_progress")
                if block.kind is not Kind.CALL:
                    item["content"] = []
                yield self._event("response.output_item.added", **place, item=item)
                if block.kind is not Kind.CALL:
                    part = _part(block, "")
                    yield self._event("response.content_part.added", **inside, part=part)
            case Grown(_, text):
                yield self._event(f"{stem}.delta", **inside, **extra, delta=text)
            case Closed(_, is_end):
                yield self._event(f"{stem}.done", **inside, **extra, **{field: block.text})
                if block.kind is not Kind.CALL:
                    part = _part(block, block.text)
                    yield self._event("response.content_part.done", **inside, part=part)
                status = _status(generation) if is_end else "completed"
                item = _item(generation.id, block, status)
                yield self._event("response.output_item.done", **place, item=item)

    def _ended(self, generation: ChatGeneration, blocks: Blocks) -> Item:
        status = _status(generation)
        items = [_item(generation.id, block, "completed") for block in blocks.all]
        if items:
            items[-1]["status"] = status
        answer = self._response(generation, status, items)
        answer["usage"] = _usage(generation)
        answer["completed_at"] = int(time.time())
        if status == "incomplete":
            answer["incomplete_details"] = {"reason": CUT[generation.choices[0].text.finish_reason]}
        if self._body.store is not False:
            conversation = [*self._history, *items_of(self._body.input), *items]
            stored = Stored(msgspec.json.encode(answer), msgspec.json.encode(conversation))
            self._keep(generation.id, stored)
        return answer

    def _response(self, generation: ChatGeneration, status: str, items: list[Item]) -> Item:
        body, shared = self._body, generation.sampling.shared
        text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text else {}
        reasoning = body.reasoning
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": generation.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": shared["temperature"],
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool.model_dump()) for tool in body.tools or []],
            "top_p": shared["top_p"],
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


# Of answers that have not ended by themselves: what clients are told.
CUT: dict[str | None, str] = {"length": "max_output_tokens", "abort": "aborted"}
TEXT_EVENTS = {
    Kind.REASONING: ("response.reasoning_text", "text"),
    Kind.TEXT: ("response.output_text", "text"),
    Kind.CALL: ("response.function_call_arguments", "arguments"),
}


def _status(generation: ChatGeneration) -> str:
    """Of an answer that has ended."""
    is_cut = generation.choices[0].text.finish_reason in CUT
    return "incomplete" if is_cut else "completed"


def _item_id(response_id: str, block: Block) -> str:
    return f"{ID_PREFIXES[block.kind]}_{response_id.partition('_')[2]}_{block.index}"


def _part(block: Block, text: str) -> Item:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(response_id: str, block: Block, status: str) -> Item:
    item_id = _item_id(response_id, block)
    match block.kind:
        case Kind.REASONING:
            parts = [_part(block, block.text)]
            body: Item = {"type": "reasoning", "summary": [], "content": parts}
        case Kind.TEXT:
            body = {"type": "message", "role": "assistant", "content": [_part(block, block.text)]}
        case Kind.CALL:
            body = {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
    return {"id": item_id, **body, "status": status}


def _shown_tool(tool: Item) -> Item:
    return {"parameters": None, "strict": None, **tool}


def _usage(generation: ChatGeneration) -> Item:
    usage = generation.usage
    details = usage.completion_tokens_details
    assert isinstance(details, msgspec.Struct)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
