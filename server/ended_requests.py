"""What is known of a request when it has ended: for metrics, logs and traces. Nothing is decided by
it, and it holds no prompt and no output.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Which HTTP request an engine request belongs to."""

    request_id: str
    """As the client is told: its own, or a new one."""
    operation: str
    """"chat" or "text_completion", as traces name it."""
    model: str
    num_per_prompt: int
    max_tokens: int | None
    """As given; None where the client left it open."""
    temperature: float
    top_p: float
    headers: Mapping[str, str]
    """Those that carry the context of a trace."""


@dataclass(frozen=True)
class EndedChoice:
    """One choice. Times in `time.monotonic()` seconds."""

    rank: int
    reason: str
    """"stop", "length", "abort" or "error"."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    """As far as the engine has told: with the last output, so none for what was aborted."""
    max_tokens: int
    submitted_at: float
    queue_s: float
    """Between its arrival at the rank and its first step."""
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.submitted_at

    @property
    def first_token_s(self) -> float | None:
        """From its submission on; None where no token came."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    @property
    def prefill_s(self) -> float | None:
        """From its first step to its first token."""
        return None if self.first_token_s is None else max(0.0, self.first_token_s - self.queue_s)

    @property
    def decode_s(self) -> float | None:
        """From its first to its last token."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def per_token_s(self) -> float | None:
        """Mean time of an output token after the first; None where there is none."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class EndedRequest:
    """All choices of one HTTP request."""

    origin: Origin
    choices: tuple[EndedChoice, ...]
