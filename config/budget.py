"""B, the one number: its default, and every check that `resolve()` makes of it.

Legend: B max_num_batched_tokens, S max_num_seqs, L max_model_len, T tensor parallel size (1 today).
"""

from typing import Any

from moed.config.engine_config import EngineConfig, ParallelConfig, SchedulerConfig
from moed.config.errors import ConfigError
from moed.config.settings import ServeSettings
from moed.config.sizes import format_bytes

PLAIN_DEFAULT = "the default"
BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def check(config: EngineConfig, available_bytes: int | None) -> None:
    """Hold B against the backend's limits and, on a CPU, against the node's memory.

    `available_bytes` None: not known, not checked. Raises `ConfigError` with the arithmetic.
    """
    moe, backend = config.fused_moe, config.parallel.backend
    instead = "take another --all2all-backend, or another model"
    if backend.hidden_sizes is not None and moe.hidden_size not in backend.hidden_sizes:
        sizes = ", ".join(map(str, sorted(backend.hidden_sizes)))
        raise ConfigError(
            f"all2all_backend {backend.name!r} carries hidden sizes {sizes}; that of "
            f"{config.model.model} is {moe.hidden_size}: {instead}"
        )
    if backend.max_top_k is not None and moe.top_k > backend.max_top_k:
        raise ConfigError(
            f"all2all_backend {backend.name!r} sends a token to at most {backend.max_top_k} "
            f"experts; {config.model.model} chooses {moe.top_k}: {instead}"
        )
    limit = backend.max_tokens_per_rank
    if limit is not None and moe.max_num_tokens > limit:
        raise ConfigError(
            f"max_num_batched_tokens is {moe.max_num_tokens}, and all2all_backend "
            f"{backend.name!r} takes at most {limit} tokens per rank and step: lower "
            f"--max-num-batched-tokens to at most {limit}"
        )
    if config.parallel.device == "cpu" and available_bytes is not None:
        _check_memory(config, available_bytes)


def moe_bytes_per_rank(config: EngineConfig) -> int:
    """Bytes of one MoE layer's received rows and of its results, at most, on one rank."""
    return _num_rows(config)[0] * config.model.hidden_size * _number_bytes(config) * 2


def _num_rows(config: EngineConfig) -> tuple[int, str]:
    """The most rows that one rank's experts can hold in one step, and how that is reckoned."""
    moe = config.fused_moe
    text = f"{moe.expert_parallel_size} ranks x {moe.max_num_tokens} tokens"
    if config.parallel.use_batched_dp_moe:
        # Every local expert has room for every row.
        num_local = -(-moe.num_experts // moe.expert_parallel_size)
        return num_local * moe.max_num_received_rows, f"{num_local} local experts x {text}"
    return moe.max_num_received_rows, text


def _number_bytes(config: EngineConfig) -> int:
    return BYTES_PER_NUMBER[config.model.dtype]


def _check_memory(config: EngineConfig, available_bytes: int) -> None:
    needed = moe_bytes_per_rank(config)
    ranks = config.parallel.num_local_ranks
    if needed * ranks <= available_bytes:
        return
    raise ConfigError(
        f"max_num_batched_tokens is {config.scheduler.max_num_batched_tokens}: one MoE layer then "
        f"needs {_num_rows(config)[1]} x hidden size {config.model.hidden_size} x "
        f"{_number_bytes(config)} bytes x 2 (rows and results) = {format_bytes(needed)} on each of "
        f"{ranks} rank(s), {format_bytes(needed * ranks)} together, and "
        f"{format_bytes(available_bytes)} are free; lower --max-num-batched-tokens"
    )
