"""B, the one number: its default, and what it must hold with the other settings. The limits of
backend and machine are in `refusals`.

Legend: B max_num_batched_tokens, S max_num_seqs, L max_model_len, T tensor parallel size (1 today).
"""

from typing import Any

from moed.config.engine_config import ParallelConfig, SchedulerConfig
from moed.config.errors import ConfigError
from moed.config.settings import ServeSettings

PLAIN_DEFAULT = "the default"


def decide(
    settings: ServeSettings, parallel: ParallelConfig, decided: dict[str, tuple[Any, str]]
) -> tuple[int, int]:
    """B and S, as given or by default. Raises `ConfigError` when S was given and exceeds B."""
    tokens = settings.max_num_batched_tokens
    why = "as set"
    if tokens is None:
        tokens, why = _default_budget(parallel)
        decided["max_num_batched_tokens"] = (tokens, why)
    seqs = settings.max_num_seqs
    if seqs is None:
        seqs = min(SchedulerConfig.DEFAULT_MAX_NUM_SEQS, tokens)
        if seqs < SchedulerConfig.DEFAULT_MAX_NUM_SEQS:
            lowered = f"lowered to max_num_batched_tokens {tokens}"
            decided["max_num_seqs"] = (seqs, lowered)
        else:
            decided["max_num_seqs"] = (seqs, PLAIN_DEFAULT)
    if seqs > tokens:
        raise ConfigError(
            f"max_num_seqs is {seqs} and max_num_batched_tokens is {tokens} ({why}): each running "
            "request needs at least one token per step. Raise --max-num-batched-tokens to at "
            f"least {seqs}, or lower --max-num-seqs to at most {tokens}"
        )
    length = settings.max_model_len
    if not settings.enable_chunked_prefill and length is not None and length > tokens:
        raise ConfigError(
            f"chunked prefill is off, max_model_len is {length} and max_num_batched_tokens is "
            f"{tokens} ({why}): a prompt longer than {tokens} tokens could never run. Raise "
            f"--max-num-batched-tokens to at least {length}, lower --max-model-len to at most "
            f"{tokens}, or remove --no-enable-chunked-prefill"
        )
    return tokens, seqs


def _default_budget(parallel: ParallelConfig) -> tuple[int, str]:
    if parallel.use_batched_dp_moe:
        return (
            SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP,
            f"the default with {parallel.backend.name}, whose format is batched",
        )
    return SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS, PLAIN_DEFAULT
