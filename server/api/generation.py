"""From a checked request to its choices on the engines, and their text: shared by both completion
routes.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from moed.server.api.bodies.sampling import SamplingBody
from moed.server.api.callers import caller_of
from moed.server.api.choice_text import ChoiceText, Piece, Token
from moed.server.api.errors import InvalidRequest, NotFound
from moed.server.api.logprobs import prompt_logprobs
from moed.server.api.parameters import Sampling
from moed.server.api.request_ids import SCOPE_KEY
from moed.server.api.responses import Answer, PromptTokensDetails, Usage
from moed.server.api.state import AppState
from moed.server.api.suggestions import did_you_mean
from moed.server.api.unknown_parameters import Ignored
from moed.server.ended_requests import Origin
from moed.server.engine_client import ChoiceSpec, GenerationFailed
from moed.server.messages import TokenLogprobs, TokenOutput
from moed.server.routed_experts import RoutedRecord
from moed.server.stop_strings import StopStrings

# Of one choice's routed experts.
MAX_ROUTED_BYTES = 64 * 2**20
# Then other requests have their turn.
MAX_OUTPUTS_AT_ONCE = 128
# As the W3C has them.
TRACE_HEADERS = ("traceparent", "tracestate")
RANK_HEADER = "x-data-parallel-rank"


def served_model(name: str | None, state: AppState) -> str:
    """The name to answer under. Raises `NotFound` for a model that is not served here."""
    names = state.config.model.served_model_names
    if name is None:
        return names[0]
    if name in names:
        return name
    raise NotFound(
        f"the model {name[:200]!r} does not exist here{did_you_mean(name, names)}; served: "
        f"{', '.join(names)}",
        param="model",
        code="model_not_found",
    )


def wanted_rank(request: Request, state: AppState) -> int | None:
    """The rank that a router in front has chosen. Raises `InvalidRequest`."""
    given = request.headers.get(RANK_HEADER)
    if given is None:
        return None
    num_ranks = state.config.parallel.data_parallel_size
    text = given.strip()
    if text.isascii() and text.isdigit() and len(text) < 9 and int(text) < num_ranks:
        return int(text)
    raise InvalidRequest(
        f"X-data-parallel-rank is {given[:40]!r}; it must be a rank from 0 to {num_ranks - 1}",
        param="X-data-parallel-rank",
        code="invalid_value",
    )


@dataclass
class PromptTokens:
    """One prompt, with the text that an echo of it shows."""

    token_ids: list[int]
    echo_text: str = ""


@dataclass
class ChoiceResult:
    """One choice, so far."""

    prompt: PromptTokens
    text: ChoiceText
    routed: RoutedRecord
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)
    held: Piece | None = None
    """Waits for more tokens (`stream_interval`); None before the first piece was sent."""

    def on_first(self, output: TokenOutput) -> None:
        """What the first output tells of the prompt."""
        self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens

    def gather(self, piece: Piece | None, interval: int) -> Piece | None:
        """What to send of it and of what was held: the first piece, then `interval` tokens at once,
        and at the end whatever is left.
        """
        if piece is None or (self.held is None and self.text.finish_reason is None):
            self.held = self.held if piece is None else Piece()
            return piece
        before = self.held or Piece()
        self.held = Piece(before.text + piece.text, [*before.tokens, *piece.tokens])
        if self.text.finish_reason is None and len(self.held.tokens) < interval:
            return None
        piece, self.held = self.held, Piece()
        return piece

    @property
    def tokens(self) -> list[Token]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def output_text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Generation:
    """All choices of one request: choice `p * n + i` is the `i`-th output of prompt `p`."""

    operation = "text_completion"
    """As traces name it."""

    def __init__(
        self,
        state: AppState,
        request: Request,
        body: SamplingBody,
        prompts: Sequence[PromptTokens],
        sampling: Sampling,
        ignored: Ignored,
        id_prefix: str,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Submits at once. `shown`: special tokens that are part of the text. Raises
        `InvalidRequest` for a prompt that does not fit.
        """
        self.state = state
        self.body = body
        self.ignored = ignored
        self.sampling = sampling
        self.num_per_prompt = body.n or 1
        self.prompts = prompts
        self.model = served_model(body.model, state)
        self.id = id_prefix + uuid.uuid4().hex
        self.created = int(time.time())
        if body.client_id is not None:
            request.scope[SCOPE_KEY] = body.client_id
        if body.return_routed_experts:
            check_routed_size(state, prompts, sampling)
        specs = [
            ChoiceSpec(prompt.token_ids, sampling.params(len(prompt.token_ids), choice))
            for prompt in prompts
            for choice in range(self.num_per_prompt)
        ]
        skip_special = body.skip_special_tokens is not False
        self.choices = [
            ChoiceResult(
                prompt,
                ChoiceText(
                    state.tools.tokenizer.detokenizer(prompt.token_ids, skip_special, shown),
                    StopStrings(tuple(body.stop), bool(body.include_stop_str_in_output)),
                    min_tokens=sampling.min_tokens,
                    own_stop_token_ids=sampling.stop_token_ids,
                    include_stop=bool(body.include_stop_str_in_output),
                    text_offset=len(prompt.echo_text),
                ),
                RoutedRecord(state.config.model.top_k),
            )
            for prompt in prompts
            for _ in range(self.num_per_prompt)
        ]
        rank = wanted_rank(request, state)
        self.owner = caller_of(request.scope).name
        self.names = (self.id, request.scope[SCOPE_KEY])
        self._num_open = len(self.choices)
        self._timer: asyncio.TimerHandle | None = None
        origin = self._origin(request)
        self._submission = state.engine.submit(
            specs, origin, body.priority or 0, rank, body.cache_salt
        )
        state.generations.add(self)

    def _origin(self, request: Request) -> Origin:
        shared = self.sampling.shared
        return Origin(
            request_id=request.scope[SCOPE_KEY],
            operation=self.operation,
            model=self.model,
            num_per_prompt=self.num_per_prompt,
            max_tokens=self.body.max_tokens,
            temperature=shared["temperature"],
            top_p=shared["top_p"],
            headers={
                name: request.headers[name] for name in TRACE_HEADERS if name in request.headers
            },
        )

    async def pieces(self) -> AsyncGenerator[Iterator[tuple[int, Piece]], None]:
        """Pieces of all choices as they come, those that are there together at once, until all have
        ended; aborts what has not when closed. Raises `GenerationFailed`.

        Each batch must be read to its end: a choice has ended (its `finish_reason` is set) when its
        last piece has been read, and no sooner.
        """
        try:
            while self._num_open:
                yield self._read(await self._submission.take(MAX_OUTPUTS_AT_ONCE))
        finally:
            self.close()

    def _read(self, outputs: Sequence[tuple[int, TokenOutput]]) -> Iterator[tuple[int, Piece]]:
        interval = self.body.stream_interval or 1
        for index, output in outputs:
            choice = self.choices[index]
            text = choice.text
            if text.finish_reason is not None:
                continue  # on its way when a stop string ended the choice
            if output.output_index == 0:
                choice.on_first(output)
            for part in output.routed_experts:
                choice.routed.add(part)
            piece = text.feed(output)
            if interval > 1:
                piece = choice.gather(piece, interval)
            if text.finish_reason is not None:
                self._num_open -= 1
                self._submission.stop(index)
            if piece is not None:
                yield index, piece

    async def collect(self) -> None:
        """Wait for the end of all choices; their pieces are kept."""
        async for ready in self.pieces():
            for index, piece in ready:
                self.choices[index].pieces.append(piece)

    def fail_at(self, deadline: float, error: GenerationFailed) -> None:
        """End with `error` unless all has ended by `deadline`, a time of the event loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(deadline, self._submission.fail, error)

    def abort(self) -> None:
        """End all choices where they are, with the reason "abort"."""
        self._submission.abort()

    def close(self) -> None:
        """Abort what has not ended. Safe to call twice."""
        self.state.generations.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        self._submission.close()

    @property
    def usage(self) -> Usage:
        return self.plain_usage()

    def plain_usage(self) -> Usage:
        """So far. Each prompt counts once, however many choices it has."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion = sum(choice.text.num_tokens for choice in self.choices)
        firsts = self.choices[:: self.num_per_prompt]
        cached = sum(choice.num_cached_tokens for choice in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def answer(self, kind: str, choices: list[Any], **more: Any) -> Answer:
        """A body, or a chunk of one, with `choices`."""
        return Answer(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=self.state.system_fingerprint,
            choices=choices,
            **more,
        )

    def prompt_logprobs(self, index: int) -> Any:
        """Of choice `index`'s prompt, when asked for."""
        entries = self.choices[index].prompt_logprobs
        if self.body.prompt_logprobs is None or entries is None:
            return UNSET
        token_ids = self.choices[index].prompt.token_ids
        return prompt_logprobs(token_ids, entries, self.state.tools.tokenizer)

    def routed_experts(self, index: int) -> Any:
        """Of all tokens of choice `index` but the last, which has never been an input."""
        if not self.body.return_routed_experts:
            return UNSET
        choice = self.choices[index]
        num_tokens = len(choice.prompt.token_ids) + choice.text.num_tokens - 1
        return choice.routed.encoded(num_tokens)

    @property
    def wants_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def has_changing_usage(self) -> bool:
        """True where every chunk tells the usage so far."""
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def chunk_usage(self) -> Any:
        """What every chunk but the last says of usage: null where a last one will come."""
        if self.has_changing_usage:
            return self.plain_usage()
        return None if self.wants_usage else UNSET

    def token_name(self, token_id: int) -> str:
        """As log-probabilities name it."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.state.tools.tokenizer.token_text(token_id)


def check_routed_size(state: AppState, prompts: Sequence[PromptTokens], sampling: Sampling) -> None:
    """Raises `InvalidRequest` where a choice's routed experts could be very large."""
    model = state.config.model
    for prompt in prompts:
        num_tokens = len(prompt.token_ids)
        num_tokens += sampling.params(num_tokens, 0).max_tokens
        num_bytes = 2 * num_tokens * model.num_layers * model.top_k
        if num_bytes > MAX_ROUTED_BYTES:
            raise InvalidRequest(
                f"return_routed_experts: up to {num_tokens} tokens in {model.num_layers} layers "
                f"with top-{model.top_k} take {num_bytes} bytes, and at most {MAX_ROUTED_BYTES} "
                "are returned; lower max_tokens, or shorten the prompt",
                param="return_routed_experts",
            )


def without_bad_words(sampling: Sampling, body: SamplingBody, state: AppState) -> Sampling:
    """`sampling` with the body's bad words as tokens: as they begin a text, and after a space."""
    if not body.bad_words:
        return sampling
    encode, words = state.tools.tokenizer.encode, []
    for word in body.bad_words:
        for text in (word, " " + word.lstrip()):
            token_ids = encode(text, False)
            if token_ids and token_ids not in words:
                words.append(token_ids)
    return sampling.with_bad_words(words)


def truncated(token_ids: list[int], body: SamplingBody, state: AppState) -> list[int]:
    """One end of a prompt, when the body wants no more (`truncate_prompt_tokens`)."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = state.context_length - 1
    return token_ids[:most] if body.truncation_side == "right" else token_ids[-most:]


async def encode_all(state: AppState, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    tokenizer = state.tools.tokenizer
    return list(
        await asyncio.gather(*(tokenizer.encode_async(text, add_special) for text in texts))
    )
