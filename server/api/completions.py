"""`POST /v1/completions`."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.bodies.completion import CompletionBody
from moed.server.api.choice_text import Piece, Token
from moed.server.api.chunks import Chunks
from moed.server.api.errors import ContextLengthExceeded, InvalidRequest
from moed.server.api.event_stream import DONE
from moed.server.api.generation import (
    ChoiceResult,
    Generation,
    PromptTokens,
    encode_all,
    served_model,
    truncated,
    without_bad_words,
)
from moed.server.api.json_route import JsonRoute
from moed.server.api.logprobs import CompletionLogprobs, completion_logprobs
from moed.server.api.parameters import (
    Defaults,
    Sampling,
    check_num_tokens,
    check_token_ids,
    make_sampling,
)
from moed.server.api.respond import respond
from moed.server.api.responses import CompletionChoice
from moed.server.api.state import AppState
from moed.server.api.structured import asked_grammar, engine_grammar
from moed.server.api.unknown_parameters import Ignored, check_unknown
from moed.server.grammar_checker import Question

KIND = "text_completion"


def completions_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["completions"], route_class=JsonRoute)
    defaults = Defaults.of(state.config)
    timeout_s = state.config.server.request_timeout_s

    @router.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue one or several prompts."""

        async def start() -> Generation:
            prompts, sampling, ignored = await prepare_completion(state, body, defaults)
            return Generation(state, request, body, prompts, sampling, ignored, "cmpl-")

        events = stream_completion if body.stream else None
        return await respond(request, start(), events, whole_completion, timeout_s)

    return router


async def prepare_completion(
    state: AppState, body: CompletionBody, defaults: Defaults
) -> tuple[list[PromptTokens], Sampling, Ignored]:
    """A request, checked: what is left is to generate. Raises `ApiError`."""
    served_model(body.model, state)
    ignored = check_unknown(body, state.config)
    sampling = make_sampling(body, state.config, defaults, state.context_length)
    sampling = without_bad_words(sampling, body, state)
    asked = asked_grammar(body, state)
    prompts = await read_prompts(body, state)
    if asked is not None:
        question = Question(asked.kind, asked.source)
        sampling = sampling.with_grammar(await engine_grammar(question, asked.param, state))
    return prompts, sampling, ignored


async def read_prompts(body: CompletionBody, state: AppState) -> list[PromptTokens]:
    """Tokens of every prompt, checked. Raises `InvalidRequest`, for all if one is bad."""
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if isinstance(given[0], int):
        given = [given]
    check_num_choices(len(given) * (body.n or 1), state)
    names = [f"prompt[{index}]" if len(given) > 1 else "prompt" for index in range(len(given))]
    if isinstance(given[0], str):
        for name, text in zip(names, given, strict=True):
            if body.truncate_prompt_tokens is None:
                check_length(text, name, state)
        whole = await encode_all(state, given, body.add_special_tokens is not False)
        token_ids = [truncated(ids, body, state) for ids in whole]
    else:
        token_ids = [truncated(ids, body, state) for ids in given]
        for name, ids in zip(names, token_ids, strict=True):
            check_num_tokens(len(ids), state.context_length, name)
            check_token_ids(ids, state.config.model.vocab_size, name)
    prompts = []
    for name, ids, original in zip(names, token_ids, given, strict=True):
        if not ids:
            raise InvalidRequest(
                f"{name} is empty: it must hold at least one token",
                param=name,
                code="invalid_value",
            )
        prompts.append(PromptTokens(ids, echo_text(ids, original, state) if body.echo else ""))
    return prompts


def check_num_choices(num_choices: int, state: AppState) -> None:
    """Refuse what could never be taken in, even by an idle server."""
    scheduler = state.config.scheduler
    slots = scheduler.max_num_seqs * state.config.parallel.data_parallel_size
    most = max(slots, scheduler.max_num_queued_requests)
    if num_choices > most:
        raise InvalidRequest(
            f"prompts times n gives {num_choices} choices in one request; at most {most} are taken",
            param="prompt",
            code="invalid_value",
        )


def check_length(text: str, name: str, state: AppState) -> None:
    """Refuse what cannot fit before any time is spent on it. Raises `ContextLengthExceeded`."""
    length = state.context_length
    if not state.tools.tokenizer.fits(text, length):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {length} tokens, and the prompt is too long: "
            f"{name} has {len(text)} characters, which are certainly more. Please shorten it.",
            param=name,
        )


def echo_text(token_ids: list[int], original: str | list[int], state: AppState) -> str:
    if isinstance(original, str):
        return original
    return state.tools.tokenizer.decode(token_ids, skip_special_tokens=True)


def echo_tokens(choice: ChoiceResult, state: AppState) -> list[Token]:
    """The prompt's tokens with their log-probabilities, as an echo shows them."""
    detokenizer = state.tools.tokenizer.detokenizer((), skip_special_tokens=True)
    logprobs = choice.prompt_logprobs or [None] * len(choice.prompt.token_ids)
    tokens, offset = [], 0
    for token_id, entry in zip(choice.prompt.token_ids, logprobs, strict=True):
        tokens.append(Token(token_id, min(offset, len(choice.prompt.echo_text)), entry))
        offset += len(detokenizer.add(token_id))
    return tokens


def _logprobs(
    generation: Generation, body: CompletionBody, tokens: list[Token]
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    return completion_logprobs(tokens, generation.token_name)


def whole_completion(generation: Generation) -> Response:
    body = generation.body
    assert isinstance(body, CompletionBody)
    choices = []
    for index, choice in enumerate(generation.choices):
        tokens = choice.tokens
        shown = [*echo_tokens(choice, generation.state), *tokens] if body.echo else tokens
        choices.append(
            CompletionChoice(
                index=index,
                text=choice.prompt.echo_text + choice.output_text,
                logprobs=_logprobs(generation, body, shown),
                finish_reason=choice.text.finish_reason,
                stop_reason=choice.text.stop_reason,
                token_ids=[t.token_id for t in tokens] if body.return_token_ids else UNSET,
                prompt_token_ids=choice.prompt.token_ids if body.return_token_ids else UNSET,
                prompt_logprobs=generation.prompt_logprobs(index),
                routed_experts=generation.routed_experts(index),
            )
        )
    warnings = generation.ignored.warnings or UNSET
    answer = generation.answer(KIND, choices, usage=generation.usage, warnings=warnings)
    return Response(
        msgspec.json.encode(answer),
        headers=generation.ignored.headers,
        media_type="application/json",
    )


async def stream_completion(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Text as it comes; each choice ends with a chunk of its own that says why."""
    body = generation.body
    assert isinstance(body, CompletionBody)
    warnings = generation.ignored.warnings
    has_begun = [False] * len(generation.choices)
    chunks = Chunks(generation, KIND)
    pieces = generation.pieces()
    try:
        async for ready in pieces:
            events = []
            for index, piece in ready:
                for choice in _choices(generation, body, index, piece, not has_begun[index]):
                    if warnings:
                        events.append(chunks.event_with(choice, warnings=warnings))
                        warnings = []
                    else:
                        events.append(chunks.event(choice))
                has_begun[index] = True
            yield b"".join(events)
        yield chunks.usage() + DONE
    finally:
        await pieces.aclose()


def _choices(
    generation: Generation, body: CompletionBody, index: int, piece: Piece, is_first: bool
) -> list[CompletionChoice]:
    """Of one chunk each."""
    choice = generation.choices[index]
    chunks = []
    echo = bool(body.echo) and is_first
    text, tokens = piece.text, piece.tokens
    shown = [*echo_tokens(choice, generation.state), *tokens] if echo else tokens
    if echo:
        text = choice.prompt.echo_text + text
    prompt_ids: Any = choice.prompt.token_ids if body.return_token_ids and is_first else UNSET
    if text or (choice.text.finish_reason is None):
        chunks.append(
            CompletionChoice(
                index=index,
                text=text,
                logprobs=_logprobs(generation, body, shown),
                token_ids=[t.token_id for t in tokens] if body.return_token_ids else UNSET,
                prompt_token_ids=prompt_ids,
            )
        )
        shown, tokens, prompt_ids = [], [], UNSET
    if choice.text.finish_reason is not None:
        chunks.append(
            CompletionChoice(
                index=index,
                text="",
                logprobs=_logprobs(generation, body, shown) if shown else None,
                finish_reason=choice.text.finish_reason,
                stop_reason=choice.text.stop_reason,
                token_ids=[t.token_id for t in tokens] if body.return_token_ids else UNSET,
                prompt_token_ids=prompt_ids,
                routed_experts=generation.routed_experts(index),
            )
        )
    return chunks
