"""`resolve()`: the one function that turns settings into the frozen `EngineConfig`.

Every default that depends on something else is decided here, and every cross-check made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moed.config import budget, environ, machine, refusals
from moed.config.attention import AUTO, choose_attention
from moed.config.capabilities import BackendCapabilities
from moed.config.cors import cors_config
from moed.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    RecoveryConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from moed.config.errors import ConfigError
from moed.config.graphs import graph_buckets
from moed.config.hub import fetch
from moed.config.keys import all_keys
from moed.config.machine import Machine
from moed.config.model import BUNDLED_NAME, bundled_checkpoint, load_model_config
from moed.config.nodes import nodes_config
from moed.config.placement_file import read_placement
from moed.config.settings import ServeSettings
from moed.config.tls import tls_config
from moed.config.tracing import traces_endpoint

SHARDING_BACKEND = "allgather_reducescatter"

Decided = dict[str, tuple[Any, str]]
"""Setting's name → (value, why), for what was left to be decided."""


@dataclass(frozen=True)
class Resolution:
    """The configuration, and which of its values were decided here and why."""

    config: EngineConfig
    decided: Mapping[str, tuple[Any, str]]
    machine: Machine
    """What it was decided for."""


def resolve(
    settings: ServeSettings, capabilities: Mapping[str, BackendCapabilities]
) -> EngineConfig:
    """The configuration of every process. Downloads a Hub model that is not cached.

    `capabilities` holds each dispatch backend's declaration. Raises `ConfigError` for settings that
    contradict each other, the model or the backend, `ModelError` for a checkpoint that cannot be
    served.
    """
    return resolve_and_explain(settings, capabilities, weights=True).config


def resolve_and_explain(
    settings: ServeSettings, capabilities: Mapping[str, BackendCapabilities], weights: bool
) -> Resolution:
    """As `resolve`, with the reasons; `weights` False does not download them."""
    # The others are taken to be like this one.
    here = replace(machine.this_machine(settings.device), num_nodes=settings.nnodes)
    resolution = assemble(
        settings, capabilities, here, lambda decided: _model(settings, decided, weights)
    )
    refusals.check(resolution.config, here)
    return resolution


def assemble(
    settings: ServeSettings,
    capabilities: Mapping[str, BackendCapabilities],
    here: Machine,
    load_model: Callable[[Decided], ModelConfig],
) -> Resolution:
    """The configuration for `here`, before it is held against the limits of backend and machine.

    Raises `ConfigError` for settings that contradict each other.
    """
    decided: Decided = {}
    # What needs no model first, so that a slip is told before a long download.
    nodes = nodes_config(settings)
    parallel = _parallel(settings, capabilities, here, decided)
    cache = _cache(settings)
    budget_tokens, num_seqs = budget.decide(settings, parallel, decided)
    server = _server(settings)
    model = load_model(decided)
    if settings.expert_placement is not None:
        table = read_placement(settings.expert_placement, model, parallel.world_size)
        parallel = replace(parallel, expert_placement=table)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=budget_tokens,
        max_num_seqs=num_seqs,
        max_model_len=settings.max_model_len,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        max_num_queued_requests=settings.max_num_queued_requests,
    )
    config = EngineConfig(
        model=model,
        parallel=parallel,
        scheduler=scheduler,
        cache=cache,
        runner=_runner(settings, parallel, model, here, min(num_seqs, budget_tokens), decided),
        server=server,
        nodes=nodes,
        fault_injection=settings.fault_injection,
    )
    _check_lengths(settings, model)
    _check_heads(settings.tensor_parallel_size, model)
    if settings.max_model_len is None:
        longest = model.max_position_embeddings
        if not settings.enable_chunked_prefill:
            longest = min(longest, budget_tokens)
        why = f"decided at start: at most {longest}, less if less memory is free"
        decided["max_model_len"] = ("auto", why)
    return Resolution(config, decided, here)


def _parallel(
    settings: ServeSettings,
    capabilities: Mapping[str, BackendCapabilities],
    here: Machine,
    decided: Decided,
) -> ParallelConfig:
    num_processes = _num_processes(settings)
    num_local = num_processes // settings.nnodes
    if settings.expert_placement is not None and not settings.enable_expert_parallel:
        raise ConfigError(
            f"expert_placement is {settings.expert_placement!r}, and enable_expert_parallel is "
            "off: each rank holds a part of every expert then; leave out one of the two"
        )
    device = _device(settings, here, decided)
    num_threads = settings.num_threads
    if num_threads is None:
        cores = environ.available_cores()
        num_threads = max(1, cores // num_local)
        decided["num_threads"] = (
            num_threads,
            f"{_plural(cores, 'core')} for {_plural(num_local, 'rank')}",
        )
    return ParallelConfig(
        data_parallel_size=settings.data_parallel_size,
        tensor_parallel_size=settings.tensor_parallel_size,
        # One process holds whole experts whatever is asked for.
        enable_expert_parallel=settings.enable_expert_parallel or num_processes == 1,
        num_local_ranks=num_local,
        backend=_backend(settings, capabilities, device, decided),
        device=device,
        num_threads=num_threads,
        distributed_timeout_s=settings.distributed_timeout,
        agreement_backend=_agreement_backend(settings, device, decided),
    )


def _num_processes(settings: ServeSettings) -> int:
    return settings.data_parallel_size * settings.tensor_parallel_size


def _device(settings: ServeSettings, here: Machine, decided: Decided) -> str:
    found = here.gpu
    if settings.device == "cuda" and not found:
        raise ConfigError(
            "device is 'cuda', and no NVIDIA device is found on this machine (or "
            "CUDA_VISIBLE_DEVICES hides all); take --device cpu, or auto"
        )
    if settings.device != "auto":
        return settings.device
    device = "cuda" if found else "cpu"
    decided["device"] = (device, f"found {found}" if found else "no NVIDIA device found")
    return device


def _backend(
    settings: ServeSettings,
    capabilities: Mapping[str, BackendCapabilities],
    device: str,
    decided: Decided,
) -> BackendCapabilities:
    size, is_sharded = _num_processes(settings), not settings.enable_expert_parallel
    is_sharded &= size > 1
    name = settings.all2all_backend
    if name == "auto":
        name, why = ("local" if size == 1 else "all2allv"), _plural(size, "rank")
        if is_sharded:
            name, why = SHARDING_BACKEND, "expert parallelism is off"
        decided["all2all_backend"] = (name, why)
    if name not in capabilities:
        raise ConfigError(
            f"all2all_backend is {name!r}: available are auto, {', '.join(sorted(capabilities))}"
        )
    backend = capabilities[name]
    usable = sorted(
        other.name
        for other in capabilities.values()
        if device in other.devices
        and (size == 1 or other.requires_expert_parallel)
        and (other.can_shard_experts or not is_sharded)
    )
    instead = f"; take --all2all-backend auto, or one of {', '.join(usable)}"
    if size > 1 and not backend.requires_expert_parallel:
        raise ConfigError(
            f"all2all_backend is {name!r}, which serves one rank, and data_parallel_size "
            f"{settings.data_parallel_size} x tensor_parallel_size "
            f"{settings.tensor_parallel_size} are {size}{instead}"
        )
    if is_sharded and not backend.can_shard_experts:
        raise ConfigError(
            f"enable_expert_parallel is off, and all2all_backend {name!r} carries rows to whole "
            f"experts only{instead}"
        )
    if device not in backend.devices:
        raise ConfigError(
            f"all2all_backend {name!r} runs on {', '.join(sorted(backend.devices))}, and device is "
            f"{device!r}{instead}"
        )
    return backend


def _agreement_backend(settings: ServeSettings, device: str, decided: Decided) -> str:
    name = settings.agreement_backend
    if name == "auto":
        name = "nccl" if device == "cuda" else "gloo"
        decided["agreement_backend"] = (name, f"device is {device}")
    if name == "nccl" and device == "cpu":
        raise ConfigError(
            "agreement_backend is 'nccl', which needs GPUs, and device is 'cpu'; take "
            "--agreement-backend gloo, or auto"
        )
    return name


def _runner(
    settings: ServeSettings,
    parallel: ParallelConfig,
    model: ModelConfig,
    here: Machine,
    max_num_rows: int,
    decided: Decided,
) -> RunnerConfig:
    asked = settings.attention_backend
    attention, why = choose_attention(asked, parallel.device, model, here)
    if asked == AUTO:
        decided["attention_backend"] = (attention, why)
    if settings.step_ahead and parallel.tensor_parallel_size > 1:
        # The members learn a step's tokens from the first one's host.
        raise ConfigError(
            f"step_ahead is on and tensor_parallel_size is {parallel.tensor_parallel_size}: steps "
            "ahead need a rank of one process; leave out one of the two"
        )
    on_gpu = parallel.device == "cuda"
    replays = on_gpu and parallel.backend.graph_safe and not settings.enforce_eager
    return RunnerConfig(
        attention_backend=attention,
        cpu_kernels=settings.cpu_kernels,
        graph_buckets=graph_buckets(max_num_rows) if replays else (),
        step_ahead=settings.step_ahead,
    )


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _cache(settings: ServeSettings) -> CacheConfig:
    if settings.num_kv_blocks is not None and settings.kv_cache_memory is not None:
        raise ConfigError(
            f"num_kv_blocks is {settings.num_kv_blocks} and kv_cache_memory is "
            f"{settings.kv_cache_memory}: both say how large the KV cache is; give one of them"
        )
    return CacheConfig(
        block_size=settings.block_size,
        num_kv_blocks=settings.num_kv_blocks,
        kv_cache_memory_bytes=settings.kv_cache_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=settings.enable_prefix_caching,
    )


def _server(settings: ServeSettings) -> ServerConfig:
    if settings.drain_delay and settings.drain_delay >= settings.shutdown_timeout:
        raise ConfigError(
            f"drain_delay is {settings.drain_delay:g} s, of the {settings.shutdown_timeout:g} s in "
            "shutdown_timeout: it must be shorter, so that requests can finish after it"
        )
    return ServerConfig(
        host=settings.host,
        port=settings.port,
        shutdown_timeout_s=settings.shutdown_timeout,
        drain_delay_s=settings.drain_delay,
        api_keys=all_keys(settings.api_keys, settings.api_key_file),
        max_logprobs=settings.max_logprobs,
        log_level=settings.log_level,
        access_log=settings.access_log,
        strict_params=settings.strict_params,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        max_request_bytes=settings.max_request_bytes,
        admin_api_keys=all_keys(settings.admin_api_keys, settings.admin_api_key_file),
        request_timeout_s=settings.request_timeout,
        slow_reader_timeout_s=settings.slow_reader_timeout,
        tls=tls_config(settings),
        cors=cors_config(settings),
        observability=ObservabilityConfig(
            log_format=settings.log_format,
            log_requests=settings.log_requests,
            metrics_compat=settings.metrics_compat,
            otlp_traces_endpoint=traces_endpoint(settings.otlp_traces_endpoint),
        ),
        recovery=RecoveryConfig(
            on_rank_failure=settings.on_rank_failure,
            max_restarts=settings.max_restarts,
            recovery_timeout_s=settings.recovery_timeout,
            step_timeout_s=settings.step_timeout,
        ),
    )


def _model(settings: ServeSettings, decided: Decided, weights: bool) -> ModelConfig:
    bundled = settings.model is None or settings.model == BUNDLED_NAME
    name = BUNDLED_NAME if settings.model is None else settings.model
    if bundled:
        path = bundled_checkpoint()
    else:
        path = fetch(
            name,
            settings.revision,
            settings.offline,
            environ.hub_token(),
            weights=weights and settings.load_format != "dummy",
        )
    if not settings.served_model_name:
        decided["served_model_name"] = ((name,), "MODEL as given")
    model = load_model_config(
        path,
        model=name,
        revision=settings.revision,
        served_model_names=settings.served_model_name or (name,),
        dtype=settings.dtype,
        load_format=settings.load_format,
        seed=settings.seed,
    )
    if settings.model is None:
        decided["model"] = (name, f"bundled, {path}")
    if settings.dtype == "auto":
        decided["dtype"] = (model.dtype, "the checkpoint's")
    return model


def _check_heads(num_members: int, model: ModelConfig) -> None:
    """Each member of a tensor-parallel group takes the same number of heads."""
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    fitting = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    if num_members not in fitting:
        raise ConfigError(
            f"tensor_parallel_size is {num_members}, and {model.model} has {heads} attention heads "
            f"and {kv_heads} KV heads, which do not divide evenly; take one of "
            f"{', '.join(map(str, fitting))}"
        )


def _check_lengths(settings: ServeSettings, model: ModelConfig) -> None:
    length = settings.max_model_len
    if length is None:
        return
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {length}, and the model has {model.max_position_embeddings} "
            "positions (max_position_embeddings in config.json); lower --max-model-len, or give "
            "auto"
        )
    blocks = settings.num_kv_blocks
    if blocks is not None and blocks * settings.block_size < length:
        needed = -(-length // settings.block_size)
        raise ConfigError(
            f"max_model_len is {length}, and num_kv_blocks {blocks} x block_size "
            f"{settings.block_size} hold {blocks * settings.block_size} tokens; raise "
            f"--num-kv-blocks to at least {needed}, or lower --max-model-len, or give it auto"
        )
