"""`POST /tokenize` and `/detokenize` and `GET /tokenizer_info`, in vLLM's shapes."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.bodies.tokenization import DetokenizeBody, TokenizeBody
from moed.server.api.completions import check_length
from moed.server.api.conversation import render
from moed.server.api.errors import InvalidRequest
from moed.server.api.generation import encode_all, served_model
from moed.server.api.json_route import JsonRoute
from moed.server.api.parameters import check_token_ids
from moed.server.api.state import AppState

MAX_INLINE_TOKENS = 4096


def tokenization_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["tokenization"], route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Token ids of a text, or of a conversation as its template renders it."""
        served_model(body.model, state)
        text, is_chat = await _text_of(body, state)
        check_length(text, "messages" if is_chat else "prompt", state)
        add_special = body.add_special_tokens
        if add_special is None:
            add_special = not is_chat
        (ids,) = await encode_all(state, [text], add_special)
        names = [state.tools.tokenizer.token_name(i) for i in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": state.context_length,
                "tokens": ids,
                "token_strs": names if body.return_token_strs else None,
            }
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids, special ones included."""
        served_model(body.model, state)
        check_token_ids(body.tokens, state.config.model.vocab_size, "tokens")
        decode = state.tools.tokenizer.decode
        if len(body.tokens) <= MAX_INLINE_TOKENS:
            return _json({"prompt": decode(body.tokens, False)})
        return _json({"prompt": await asyncio.to_thread(decode, body.tokens, False)})

    @router.get("/tokenizer_info")
    async def info(request: Request) -> Response:
        """The tokenizer's configuration and the chat template."""
        return _json(state.tools.info)

    return router


async def _text_of(body: TokenizeBody, state: AppState) -> tuple[str, bool]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt, False
    assert body.messages is not None
    text = await render(
        state,
        body.messages,
        body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        options=body.chat_template_kwargs or {},
    )
    return text, True


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
