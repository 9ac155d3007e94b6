"""From a request body to `SamplingParams`: defaults, checks against the model, refusals by name."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moed.config.engine_config import EngineConfig
from moed.server.api.bodies.chat import ChatBody
from moed.server.api.bodies.completion import CompletionBody
from moed.server.api.bodies.sampling import SamplingBody
from moed.server.api.errors import ContextLengthExceeded, InvalidRequest
from moed.server.messages import ReasoningLimit, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
# Below it, dividing logits by the temperature says the same as taking the largest.
MIN_TEMPERATURE = 1e-5
UINT64_MASK = 2**64 - 1
# Odd, and far from any small multiple: neighbouring seeds and choices never meet.
CHOICE_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Defaults:
    """Sampling defaults of the checkpoint, from its generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: EngineConfig) -> "Defaults":
        given = config.model.generation_config
        # A checkpoint that says it is not to be sampled from is decoded greedily.
        fallback = 0.0 if given.get("do_sample") is False else 1.0
        return cls(
            temperature=_number(given, "temperature", fallback) if fallback else 0.0,
            top_p=_number(given, "top_p", 1.0),
            top_k=int(_number(given, "top_k", 0)),
            min_p=_number(given, "min_p", 0.0),
            repetition_penalty=_number(given, "repetition_penalty", 1.0),
        )


def _number(given: Mapping[str, Any], name: str, fallback: float) -> float:
    value = given.get(name)
    return fallback if value is None else float(value)


@dataclass(frozen=True)
class Limits:
    """Output limits of one prompt, before `SamplingParams` are made."""

    max_tokens: int | None
    default_max_tokens: int | None
    """None: the rest of the context."""
    context_length: int
    prompt_param: str
    param: str = "max_tokens"


def check_num_tokens(num_prompt_tokens: int, context_length: int, param: str) -> None:
    """Raises `ContextLengthExceeded` where no output token would fit.

    "prompt is too long" is what LangChain and coding agents look for in the message.
    """
    if num_prompt_tokens >= context_length:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context_length} tokens, prompt and output "
            f"together, and the prompt is too long: it has {num_prompt_tokens} tokens. Please "
            "shorten it.",
            param=param,
        )


def resolve_max_tokens(limits: Limits, num_prompt_tokens: int) -> int:
    """How many tokens may follow the prompt. Raises `ContextLengthExceeded` with the numbers."""
    length = limits.context_length
    check_num_tokens(num_prompt_tokens, length, limits.prompt_param)
    rest = length - num_prompt_tokens
    if limits.max_tokens is None:
        return rest if limits.default_max_tokens is None else min(rest, limits.default_max_tokens)
    if limits.max_tokens > rest:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {length} tokens, but {num_prompt_tokens} of "
            f"the prompt and {limits.max_tokens} of the output ({limits.param}) were requested. "
            f"Please lower {limits.param} to at most {rest}, or shorten the prompt.",
            param=limits.param,
        )
    return limits.max_tokens


@dataclass(frozen=True)
class Sampling:
    """Everything of `SamplingParams` that is the same for all choices of a request."""

    shared: Mapping[str, Any]
    seed: int | None
    min_tokens: int
    limits: Limits
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Those of the request, without the model's own ends."""

    def params(self, num_prompt_tokens: int, choice: int) -> SamplingParams:
        """For the `choice`-th output of one prompt. Raises `InvalidRequest`."""
        max_tokens = resolve_max_tokens(self.limits, num_prompt_tokens)
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above the {max_tokens} tokens that may be "
                "generated",
                param="min_tokens",
                code="invalid_value",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            seed=self._seed(choice),
            **self.shared,
        )

    def cut_to_context(self) -> "Sampling":
        """The same, where `max_tokens` may be more than the context has room for."""
        most = self.limits.max_tokens
        return replace(self, limits=replace(self.limits, max_tokens=None, default_max_tokens=most))

    def with_bad_words(self, words: list[list[int]]) -> "Sampling":
        """The same, for outputs that hold none of `words`, each a sequence of tokens."""
        return replace(self, shared={**self.shared, "bad_words": words})

    def with_grammar(self, grammar: str) -> "Sampling":
        """The same, for outputs that follow `grammar` (as the engines read it)."""
        return replace(self, shared={**self.shared, "grammar": grammar})

    def with_reasoning_limit(self, limit: ReasoningLimit) -> "Sampling":
        """The same, for outputs whose reasoning ends by then."""
        return replace(self, shared={**self.shared, "reasoning_limit": limit})

    def _seed(self, choice: int) -> int:
        if self.seed is None:
            return secrets.randbits(64)
        # The first choice has the seed itself, so that n=1 and n=3 begin alike.
        return (self.seed + choice * CHOICE_SEED_STEP) & UINT64_MASK


def make_sampling(
    body: SamplingBody, config: EngineConfig, defaults: Defaults, context_length: int
) -> Sampling:
    """Check what needs the model, and fill in the defaults. Raises `InvalidRequest`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    vocab_size = config.model.vocab_size
    if body.allowed_token_ids is not None:
        check_token_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    own_stops = frozenset(body.stop_token_ids or ())
    for token in sorted(own_stops):
        _check_token_id(token, vocab_size, "stop_token_ids")
    model_stops = frozenset() if body.ignore_eos else frozenset(config.model.eos_token_ids)
    logprobs, prompt_logprobs = _logprobs(body, config)
    temperature = _given(body.temperature, defaults.temperature)
    shared: dict[str, Any] = {
        "temperature": 0.0 if temperature < MIN_TEMPERATURE else temperature,
        "top_p": _given(body.top_p, defaults.top_p),
        "top_k": max(0, int(_given(body.top_k, defaults.top_k))),
        "min_p": _given(body.min_p, defaults.min_p),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "repetition_penalty": _given(body.repetition_penalty, defaults.repetition_penalty),
        "logit_bias": _logit_bias(body.logit_bias or {}, vocab_size),
        "allowed_token_ids": body.allowed_token_ids,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "return_routed_experts": bool(body.return_routed_experts),
        "stop_token_ids": sorted(own_stops | model_stops),
    }
    return Sampling(
        shared=shared,
        seed=body.seed,
        min_tokens=body.min_tokens or 0,
        limits=_limits(body, context_length),
        stop_token_ids=own_stops,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _limits(body: SamplingBody, context_length: int) -> Limits:
    if isinstance(body, ChatBody):
        newer = body.max_completion_tokens
        if newer is None and body.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        name = "max_tokens" if newer is None else "max_completion_tokens"
        most = body.max_tokens if newer is None else newer
        return Limits(most, None, context_length, "messages", name)
    if body.max_tokens == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise InvalidRequest(
            "max_tokens must be at least 1; 0 is for scoring a prompt, with echo: true",
            param="max_tokens",
        )
    return Limits(body.max_tokens, DEFAULT_COMPLETION_TOKENS, context_length, "prompt")


def _logprobs(body: SamplingBody, config: EngineConfig) -> tuple[int | None, int | None]:
    """`logprobs` and `prompt_logprobs` of the engine request."""
    most, asked = config.server.max_logprobs, body.prompt_logprobs
    _check_count("prompt_logprobs", asked, most)
    if asked is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed; leave out stream, or prompt_logprobs",
            param="prompt_logprobs",
        )
    if isinstance(body, CompletionBody):
        _check_count("logprobs", body.logprobs, most)
        if asked is not None and body.echo and body.logprobs not in (None, asked):
            raise InvalidRequest(
                f"with echo, logprobs ({body.logprobs}) and prompt_logprobs ({asked}) must be the "
                "same number, or one of them absent",
                param="prompt_logprobs",
            )
        if not body.echo or asked is not None:
            return body.logprobs, asked
        # Scoring a prompt is all that an engine can do with no output token.
        only_scores = 0 if body.max_tokens == 0 else None
        return body.logprobs, only_scores if body.logprobs is None else body.logprobs
    assert isinstance(body, ChatBody)
    _check_count("top_logprobs", body.top_logprobs, most)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return ((body.top_logprobs or 0) if body.logprobs else None), asked


def _check_count(name: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise InvalidRequest(
            f"{name} must be at most {most} (max_logprobs), not {str(value)[:20]}",
            param=name,
            code="invalid_value",
        )


def _check_token_id(token: int, vocab_size: int, param: str) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(
            f"{param}: token id {_short(token)} is outside the vocabulary, whose ids go from 0 to "
            f"{vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


def check_token_ids(tokens: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for the first id that the model does not have."""
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
        _check_token_id(next(t for t in tokens if not 0 <= t < vocab_size), vocab_size, param)


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else "(a very large number)"


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not name.removeprefix("-").isdecimal() or len(name) > 20:
            raise InvalidRequest(
                f"logit_bias: its keys must be token ids, not {json.dumps(name[:80])}",
                param="logit_bias",
                code="invalid_value",
            )
        _check_token_id(int(name), vocab_size, "logit_bias")
        bias[int(name)] = float(value)
    return bias
