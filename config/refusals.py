"""Why a configuration cannot be served: every reason, for `resolve()` and `moed plan` alike."""

from collections.abc import Iterator
from dataclasses import replace

from moed.config.deep_ep_question import question
from moed.config.deep_ep_refusals import deep_ep_refusals
from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.config.kv_layout import kv_layout
from moed.config.machine import Machine
from moed.config.memory import (
    moe_bytes_per_rank,
    num_received_rows,
    rank_memory,
)
from moed.config.sizes import format_bytes
from moed.config.weight_bytes import BYTES_PER_NUMBER

ANOTHER_BACKEND = "take another --all2all-backend, or another model"


def check(config: EngineConfig, machine: Machine) -> None:
    """Raises `ConfigError` with every refusal."""
    found = refusals(config, machine)
    if found:
        raise ConfigError("; ".join(found))


def refusals(config: EngineConfig, machine: Machine) -> list[str]:
    """What speaks against serving `config` on `machine`, each with the numbers on both sides and
    the nearest choice that is served.
    """
    return [
        *_of_nodes(config, machine),
        *_of_backend(config, machine),
        *_of_budget(config),
        *_of_cpu_memory(config, machine),
        *_of_gpu_memory(config, machine),
    ]


def _of_nodes(config: EngineConfig, machine: Machine) -> Iterator[str]:
    ranks, nodes = config.parallel.world_size, machine.num_nodes
    per_node = machine.gpus_per_node
    if config.parallel.device == "cuda" and per_node is not None and ranks > nodes * per_node:
        yield (
            f"{ranks} ranks (--data-parallel-size x --tensor-parallel-size) need a GPU each, and "
            f"there are {nodes * per_node}: take at most {nodes * per_node}"
        )


def _of_backend(config: EngineConfig, machine: Machine) -> list[str]:
    moe, backend = config.fused_moe, config.parallel.backend
    library = backend.library
    if library and config.parallel.device == "cuda" and machine.packages is not None:
        if library not in machine.packages:
            return [
                f"all2all_backend {backend.name!r} is unavailable: the package {library} is not "
                "installed; take all2allv or allgather_reducescatter, which need torch alone"
            ]
    if backend.deep_ep_mode is not None:
        asked = question(config, machine)
        return deep_ep_refusals(asked, emulated=config.parallel.device == "cpu")
    found = []
    if backend.hidden_sizes is not None and moe.hidden_size not in backend.hidden_sizes:
        sizes = ", ".join(map(str, sorted(backend.hidden_sizes)))
        found.append(
            f"all2all_backend {backend.name!r} carries hidden sizes {sizes}; that of "
            f"{config.model.model} is {moe.hidden_size}: {ANOTHER_BACKEND}"
        )
    if backend.max_top_k is not None and moe.top_k > backend.max_top_k:
        found.append(
            f"all2all_backend {backend.name!r} sends a token to at most {backend.max_top_k} "
            f"experts; {config.model.model} chooses {moe.top_k}: {ANOTHER_BACKEND}"
        )
    return found


def _of_budget(config: EngineConfig) -> Iterator[str]:
    tokens, backend = config.fused_moe.max_num_tokens, config.parallel.backend
    limit = backend.max_tokens_per_rank
    if limit is not None and tokens > limit:
        yield (
            f"max_num_batched_tokens is {tokens}, and all2all_backend {backend.name!r} takes at "
            f"most {limit} tokens per rank and step: lower --max-num-batched-tokens to at most "
            f"{limit}"
        )


def _of_cpu_memory(config: EngineConfig, machine: Machine) -> Iterator[str]:
    available, ranks = machine.available_bytes, config.parallel.num_local_ranks
    if config.parallel.device != "cpu" or available is None:
        return
    needed = moe_bytes_per_rank(config)
    if needed * ranks > available:
        rows = num_received_rows(config, config.parallel.backend)[1]
        yield (
            f"max_num_batched_tokens is {config.scheduler.max_num_batched_tokens}: one MoE layer "
            f"then needs {rows} x hidden size {config.model.hidden_size} x "
            f"{BYTES_PER_NUMBER[config.model.dtype]} bytes x 2 (rows and results) = "
            f"{format_bytes(needed)} on each of {ranks} rank(s), {format_bytes(needed * ranks)} "
            f"together, and {format_bytes(available)} are free; lower --max-num-batched-tokens"
        )


def _of_gpu_memory(config: EngineConfig, machine: Machine) -> Iterator[str]:
    memory, cache = rank_memory(config, machine), config.cache
    if memory.usable is None or memory.left is None or machine.gpu_memory_bytes is None:
        return
    share = (
        f"{format_bytes(machine.gpu_memory_bytes)} x {cache.gpu_memory_utilization:g} "
        f"(--gpu-memory-utilization) = {format_bytes(memory.usable)}"
    )
    if memory.left < kv_layout(config).num_bytes(1):
        yield (
            f"weights {format_bytes(memory.weights)}, dispatch buffers "
            f"{format_bytes(memory.dispatch)} and workspace {format_bytes(memory.workspace)} are "
            f"{format_bytes(memory.fixed)} on each rank, and {share}, which leaves no room for a "
            f"KV block: {_what_fits(config, machine)}"
        )
        return
    yield from _of_kv_cache(config, memory.left)


def _of_kv_cache(config: EngineConfig, left: int) -> Iterator[str]:
    """What was set, against the bytes that are left for it."""
    cache, layout = config.cache, kv_layout(config)
    asked = cache.kv_cache_memory_bytes
    if cache.num_kv_blocks is not None:
        asked = layout.num_bytes(cache.num_kv_blocks)
    if asked is not None and asked > left:
        yield (
            f"the KV cache is set to {format_bytes(asked)} on each rank, and {format_bytes(left)} "
            f"are left for it: set --kv-cache-memory to at most {left}, or --num-kv-blocks to at "
            f"most {layout.num_blocks(left)}"
        )
        return
    length = config.scheduler.max_model_len
    held = layout.num_tokens(left if asked is None else asked)
    if length is not None and length > held:
        yield (
            f"max_model_len is {length}, and the KV cache of a rank holds {held} tokens of "
            f"{layout.bytes_per_token} bytes: lower --max-model-len to at most {held}, or give it "
            "auto"
        )


def _what_fits(config: EngineConfig, machine: Machine) -> str:
    """A choice with room for a block, of fewer tokens or else of more ranks."""
    tokens = largest_budget_in_memory(config, machine)
    if tokens:
        return f"lower --max-num-batched-tokens to at most {tokens}"
    parallel = config.parallel
    tensor = parallel.tensor_parallel_size
    for size in range(parallel.data_parallel_size + 1, config.model.num_experts // tensor + 1):
        wider = replace(config, parallel=replace(parallel, data_parallel_size=size))
        even = config.model.num_experts % (size * tensor) == 0
        if even and largest_budget_in_memory(wider, machine):
            return f"take at least --data-parallel-size {size}, which spreads the experts thinner"
    return "take GPUs with more memory, or a smaller model"


def largest_budget_in_memory(config: EngineConfig, machine: Machine) -> int:
    """The largest B of at least S whose buffers and workspace leave room for one KV block; 0 if
    there is none. Where the memory is not known, B itself.
    """
    scheduler = config.scheduler

    def fits(tokens: int) -> bool:
        changed = replace(config, scheduler=replace(scheduler, max_num_batched_tokens=tokens))
        left = rank_memory(changed, machine).left
        return left is None or left >= kv_layout(changed).num_bytes(1)

    low = max(1, scheduler.max_num_seqs)
    if rank_memory(config, machine).usable is None:
        return scheduler.max_num_batched_tokens
    if not fits(low):
        return 0
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
