"""Log-probabilities in the two shapes that OpenAI has for them."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from moed.server.api.choice_text import Token
from moed.server.messages import TokenLogprobs
from moed.server.tokenizer import TextTokenizer

# JSON has no minus infinity; OpenAI writes this for a token that cannot come.
LOWEST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """`/v1/completions`: parallel lists, one entry per token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`/v1/chat/completions`: one object per token."""

    content: list[ChatToken]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position, the first null: by token id, as text."""


def prompt_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    tokenizer: TextTokenizer,
) -> PromptLogprobs:
    """The prompt's own token and the k most likely ones at each position."""
    result: PromptLogprobs = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            result.append(None)
            continue
        found = {token_id: (entry.logprob, entry.rank)}
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        for place, (other, logprob) in enumerate(tops, 1):
            found.setdefault(other, (logprob, place))
        result.append(
            {
                str(other): PromptLogprob(max(value, LOWEST), rank, tokenizer.token_text(other))
                for other, (value, rank) in found.items()
            }
        )
    return result


def completion_logprobs(
    tokens: Sequence[Token], name_of: Callable[[int], str]
) -> CompletionLogprobs:
    """The top entries hold the k most likely tokens and the chosen one. A token without a
    probability (the first of a prompt) has null in both.
    """
    result = CompletionLogprobs()
    for token in tokens:
        name = name_of(token.token_id)
        result.text_offset.append(token.text_offset)
        result.tokens.append(name)
        if token.logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        logprob = max(token.logprobs.logprob, LOWEST)
        result.token_logprobs.append(logprob)
        top: dict[str, float] = {}
        for other, value in _top(token.logprobs):
            # Two ids can have one text: the likelier one stays.
            top.setdefault(name_of(other), value)
        top[name] = max(logprob, top.get(name, LOWEST))
        result.top_logprobs.append(top)
    return result


def chat_logprobs(
    tokens: Sequence[Token], name_of: Callable[[int], str], tokenizer: TextTokenizer
) -> ChatLogprobs:
    content = []
    for token in tokens:
        assert token.logprobs is not None
        content.append(
            ChatToken(
                token=name_of(token.token_id),
                logprob=max(token.logprobs.logprob, LOWEST),
                bytes=list(tokenizer.token_bytes(token.token_id)),
                top_logprobs=[
                    TopLogprob(name_of(other), value, list(tokenizer.token_bytes(other)))
                    for other, value in _top(token.logprobs)
                ],
            )
        )
    return ChatLogprobs(content)


def _top(logprobs: TokenLogprobs) -> Iterator[tuple[int, float]]:
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return ((token_id, max(value, LOWEST)) for token_id, value in pairs)
