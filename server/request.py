"""What the engine knows of one request. All of it can be rebuilt from prompt, parameters and output
tokens: `num_computed_tokens` and `block_ids` only say how far the KV cache holds them on this rank.

A token that has been chosen, but that only the device knows so far, counts among the request's
tokens as its last one, and is not in `token_ids` yet.
"""

import time
from array import array
from dataclasses import dataclass, field
from enum import Enum

from moed.server.messages import AddRequest, RoutedExperts, SamplingParams, TokenLogprobs


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One request on one rank. The scheduler alone changes it."""

    request_id: str
    epoch: int
    params: SamplingParams
    priority: int
    arrival: int
    """Place in the order of arrival; kept through preemption."""
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt, then output, as far as this process knows it."""
    max_num_tokens: int
    """Prompt plus output tokens at which it ends: by `max_tokens`, or by L."""
    num_sent_tokens: int
    """Output tokens that the front end has, or that another engine has sent."""
    prompt_logprobs: list[TokenLogprobs | None] | None
    """One per prompt token as far as known, so that preemption repeats none; None: not asked for,
    or already sent.
    """
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache, or will be before the next step reads them."""
    awaited_place: int | None = None
    """Of its last token among those that the step before has chosen, while only the device knows
    it; None: `token_ids` has all.
    """
    num_counted_prompt_tokens: int = 0
    """Prompt tokens that the rank's counter has seen."""
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Not sent yet."""
    arrived_at: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """Until its first step; None before it."""
    block_ids: "array[int]" = field(default_factory=lambda: array("q"))
    window_block_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """Of the layers that slide, where only some do (see `moed.server.window_blocks`)."""
    num_gone_blocks: int = 0
    """Of those, given back already."""
    cache_salt: str | None = None
    """Only requests with the same salt share prefixes."""
    block_keys: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as anybody has asked (see `moed.server.prefix`)."""
    num_named_blocks: int = 0
    """Blocks that others can find."""
    num_preemptions: int = 0
    """How often it has given its blocks to others."""
    num_cached_tokens: int | None = None
    """Prompt tokens that it found computed when it first ran; None before."""

    @classmethod
    def from_message(cls, message: AddRequest, arrival: int, max_model_len: int) -> "Request":
        """A request at its start, or where another engine left it. The message must have been
        checked before.
        """
        num_prompt_tokens = len(message.prompt_token_ids)
        # The first output carries the prompt's log-probabilities: with outputs, they have been
        # sent.
        wants_prompt_logprobs = (
            message.params.prompt_logprobs is not None and not message.output_token_ids
        )
        return cls(
            request_id=message.request_id,
            epoch=message.epoch,
            params=message.params,
            priority=message.priority,
            arrival=arrival,
            num_prompt_tokens=num_prompt_tokens,
            token_ids=[*message.prompt_token_ids, *message.output_token_ids],
            max_num_tokens=min(num_prompt_tokens + message.params.max_tokens, max_model_len),
            num_sent_tokens=len(message.output_token_ids),
            prompt_logprobs=[None] if wants_prompt_logprobs else None,
            cache_salt=message.cache_salt,
        )

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: lower priority numbers first, then who came first."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.awaited_place is not None)

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 for a decode; more while the prompt, or what preemption dropped, is computed."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def is_ending(self) -> bool:
        """True when the step under way is its last one, whatever that gives."""
        is_done = self.awaited_place is not None or self.num_uncomputed_tokens == 0
        return is_done and not self.wants_token

    @property
    def may_use_prefixes(self) -> bool:
        """False while it wants something of each prompt token, which a cached one cannot give."""
        return self.prompt_logprobs is None and not self.params.return_routed_experts

    @property
    def wants_token(self) -> bool:
        """False when only its prompt is scored: `max_tokens` is 0."""
        return self.num_tokens < self.max_num_tokens

    @property
    def has_unsent_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    def finish_reason(self) -> str | None:
        """ "stop" or "length" when the tokens so far end it, else None."""
        num_output_tokens = self.num_output_tokens
        if (
            num_output_tokens > 0
            and num_output_tokens >= self.params.min_tokens
            and self.token_ids[-1] in self.params.stop_token_ids
        ):
            return "stop"
        return "length" if self.num_tokens >= self.max_num_tokens else None
