"""`POST …/render`: what a request would give the engines, without having them do it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.bodies.completion import CompletionBody
from moed.server.api.bodies.sampling import SamplingBody
from moed.server.api.chat import prepare_chat
from moed.server.api.completions import prepare_completion
from moed.server.api.generation import PromptTokens, served_model
from moed.server.api.json_route import JsonRoute
from moed.server.api.parameters import Defaults, Sampling
from moed.server.api.state import AppState
from moed.server.api.unknown_parameters import Ignored


def render_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["control"], route_class=JsonRoute)
    defaults = Defaults.of(state.config)

    @router.post("/v1/completions/render")
    async def render_completion(body: CompletionBody, request: Request) -> Response:
        """The prompts as text and tokens, and every sampling parameter with its default."""
        prompts, sampling, ignored = await prepare_completion(state, body, defaults)
        return _rendered("text_completion.render", body, prompts, sampling, ignored, state)

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatBody, request: Request) -> Response:
        """The conversation as the chat template renders it, its tokens, and every sampling
        parameter with its default.
        """
        made = await prepare_chat(state, body, defaults)
        kind = "chat.completion.render"
        return _rendered(kind, body, [made.prompt], made.sampling, made.ignored, state)

    return router


def _rendered(
    kind: str,
    body: SamplingBody,
    prompts: Sequence[PromptTokens],
    sampling: Sampling,
    ignored: Ignored,
    state: AppState,
) -> Response:
    params = [sampling.params(len(prompt.token_ids), 0) for prompt in prompts]
    shown = msgspec.to_builtins(msgspec.structs.asdict(params[0]), str_keys=True)
    # Of each prompt, beside it.
    del shown["max_tokens"]
    answer: dict[str, Any] = {
        "object": kind,
        "model": served_model(body.model, state),
        "prompts": [
            {
                "text": state.tools.tokenizer.decode(prompt.token_ids, skip_special_tokens=False),
                "token_ids": prompt.token_ids,
                "num_tokens": len(prompt.token_ids),
                "max_tokens": given.max_tokens,
            }
            for prompt, given in zip(prompts, params, strict=True)
        ],
        # A seed that the request does not give is drawn anew each time.
        "sampling": {**shown, "n": body.n or 1, "stop": body.stop, "seed": body.seed},
    }
    if ignored.warnings:
        answer["warnings"] = ignored.warnings
    return Response(
        msgspec.json.encode(answer), headers=ignored.headers, media_type="application/json"
    )
