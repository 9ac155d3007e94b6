"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.answer_plan import AnswerPlan, offered_tools, plan_answer
from moed.server.api.bodies.chat import ChatBody
from moed.server.api.chat_output import ChatOutput
from moed.server.api.choice_text import Piece, Token
from moed.server.api.chunks import Chunks
from moed.server.api.completions import check_num_choices
from moed.server.api.conversation import render, template_options, tokenize_conversation
from moed.server.api.errors import InvalidRequest
from moed.server.api.event_stream import DONE
from moed.server.api.generation import (
    Generation,
    PromptTokens,
    served_model,
    truncated,
    without_bad_words,
)
from moed.server.api.json_route import JsonRoute
from moed.server.api.logprobs import ChatLogprobs, chat_logprobs
from moed.server.api.parameters import Defaults, Sampling, make_sampling
from moed.server.api.respond import respond
from moed.server.api.responses import (
    ChatChoice,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    Usage,
)
from moed.server.api.state import AppState
from moed.server.api.structured import asked_grammar, check_each_tool, engine_grammar
from moed.server.api.unknown_parameters import Ignored, check_unknown

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


def chat_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["chat"], route_class=JsonRoute)
    defaults = Defaults.of(state.config)
    timeout_s = state.config.server.request_timeout_s

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        events = stream_chat if body.stream else None
        start = start_chat(state, request, body, defaults)
        return await respond(request, start, events, whole_chat, timeout_s)

    return router


async def rendered_chat(body: ChatBody, state: AppState) -> tuple[str, PromptTokens]:
    """A conversation's prompt. Raises `InvalidRequest` or `TemplateFailed`."""
    text = await render(
        state,
        body.messages,
        offered_tools(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        options=template_options(body),
    )
    prompt = await tokenize_conversation(
        text, bool(body.add_special_tokens), state, body.truncate_prompt_tokens is None
    )
    prompt.token_ids = truncated(prompt.token_ids, body, state)
    return text, prompt


@dataclass(frozen=True)
class PreparedChat:
    """A request, checked and rendered: what is left is to generate."""

    prompt: PromptTokens
    sampling: Sampling
    ignored: Ignored
    plan: AnswerPlan


async def prepare_chat(
    state: AppState, body: ChatBody, defaults: Defaults, *, is_cut_to_context: bool = False
) -> PreparedChat:
    """`is_cut_to_context`: the output may be shorter than was asked for, where the context ends.
    Raises `ApiError` or `TemplateFailed`.
    """
    served_model(body.model, state)
    ignored = check_unknown(body, state.config)
    check_num_choices(body.n or 1, state)
    sampling = make_sampling(body, state.config, defaults, state.context_length)
    if is_cut_to_context:
        sampling = sampling.cut_to_context()
    sampling = without_bad_words(sampling, body, state)
    asked, tools = asked_grammar(body, state), offered_tools(body)
    text, prompt = await rendered_chat(body, state)
    plan = plan_answer(body, tools, text, asked, state.tools)
    if plan.question is not None:
        try:
            grammar = await engine_grammar(plan.question, plan.param, state)
        except InvalidRequest:
            await check_each_tool(tools, state)
            raise
        sampling = sampling.with_grammar(grammar)
    if plan.limit is not None:
        sampling = sampling.with_reasoning_limit(plan.limit)
    return PreparedChat(prompt, sampling, replace(ignored, notes=plan.notes), plan)


async def start_chat(
    state: AppState,
    request: Request,
    body: ChatBody,
    defaults: Defaults,
    id_prefix: str = "chatcmpl-",
    *,
    is_cut_to_context: bool = False,
) -> "ChatGeneration":
    """Prepare and submit. Raises `ApiError` or `TemplateFailed`."""
    prepared = await prepare_chat(state, body, defaults, is_cut_to_context=is_cut_to_context)
    return ChatGeneration(
        state,
        request,
        body,
        prepared.prompt,
        prepared.sampling,
        prepared.ignored,
        prepared.plan,
        id_prefix,
    )


class ChatGeneration(Generation):
    """A generation whose choices are read for reasoning and tool calls."""

    operation = "chat"

    def __init__(
        self,
        state: AppState,
        request: Request,
        body: ChatBody,
        prompt: PromptTokens,
        sampling: Sampling,
        ignored: Ignored,
        plan: AnswerPlan,
        id_prefix: str,
    ) -> None:
        super().__init__(state, request, body, [prompt], sampling, ignored, id_prefix, plan.shown)
        shows_reasoning = body.include_reasoning is not False
        self.outputs = [
            ChatOutput(plan.options, choice.text, shows_reasoning=shows_reasoning)
            for choice in self.choices
        ]

    @property
    def usage(self) -> Usage:
        usage = self.plain_usage()
        num_reasoning = sum(output.num_reasoning_tokens for output in self.outputs)
        usage.completion_tokens_details = CompletionTokensDetails(num_reasoning)
        return usage


def _logprobs(generation: Generation, tokens: list[Token]) -> ChatLogprobs | None:
    body = generation.body
    assert isinstance(body, ChatBody)
    if not body.logprobs:
        return None
    return chat_logprobs(tokens, generation.token_name, generation.state.tools.tokenizer)


def _token_ids(generation: Generation, tokens: list[Token]) -> Any:
    return [token.token_id for token in tokens] if generation.body.return_token_ids else UNSET


def _prompt_token_ids(generation: Generation) -> Any:
    return generation.prompts[0].token_ids if generation.body.return_token_ids else UNSET


def whole_chat(generation: Generation) -> Response:
    assert isinstance(generation, ChatGeneration)
    choices = []
    for index, (choice, output) in enumerate(
        zip(generation.choices, generation.outputs, strict=True)
    ):
        for number, piece in enumerate(choice.pieces, 1):
            output.deltas(piece, is_last=number == len(choice.pieces))
        tokens = choice.tokens
        choices.append(
            ChatChoice(
                index=index,
                message=output.message,
                logprobs=_logprobs(generation, tokens),
                finish_reason=output.finish_reason,
                stop_reason=choice.text.stop_reason,
                token_ids=_token_ids(generation, tokens),
                routed_experts=generation.routed_experts(index),
            )
        )
    answer = generation.answer(
        KIND,
        choices,
        usage=generation.usage,
        prompt_token_ids=_prompt_token_ids(generation),
        prompt_logprobs=generation.prompt_logprobs(0),
        warnings=generation.ignored.warnings or UNSET,
    )
    return Response(
        msgspec.json.encode(answer),
        headers=generation.ignored.headers,
        media_type="application/json",
    )


async def stream_chat(generation: Generation) -> AsyncGenerator[bytes, None]:
    """A chunk with the role for each choice, what it says as it comes, and a chunk that ends it."""
    assert isinstance(generation, ChatGeneration)
    chunks = Chunks(generation, CHUNK_KIND)
    # Tokens of which nothing is shown yet: they come with the next chunk of their choice.
    waiting: list[list[Token]] = [[] for _ in generation.choices]
    pieces = generation.pieces()
    try:
        for index in range(len(generation.choices)):
            opening = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            more: dict[str, Any] = {}
            if index == 0:
                more["prompt_token_ids"] = _prompt_token_ids(generation)
                more["warnings"] = generation.ignored.warnings or UNSET
            yield chunks.event_with(opening, **more)
        async for ready in pieces:
            events = [
                chunks.event(choice)
                for index, piece in ready
                for choice in _chunk_choices(generation, index, piece, waiting)
            ]
            yield b"".join(events)
        yield chunks.usage() + DONE
    finally:
        await pieces.aclose()


def _chunk_choices(
    generation: ChatGeneration, index: int, piece: Piece, waiting: list[list[Token]]
) -> Iterator[ChunkChoice]:
    """Of one chunk each."""
    tokens = waiting[index] + piece.tokens
    output, text = generation.outputs[index], generation.choices[index].text
    for delta in output.deltas(piece, is_last=text.finish_reason is not None):
        yield ChunkChoice(
            index=index,
            delta=delta,
            logprobs=_logprobs(generation, tokens) if tokens else None,
            token_ids=_token_ids(generation, tokens),
        )
        tokens = []
    if text.finish_reason is not None:
        yield ChunkChoice(
            index=index,
            delta=Delta(),
            logprobs=_logprobs(generation, tokens) if tokens else None,
            finish_reason=output.finish_reason,
            stop_reason=text.stop_reason,
            token_ids=_token_ids(generation, tokens),
            routed_experts=generation.routed_experts(index),
        )
    waiting[index] = tokens
