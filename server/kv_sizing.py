"""How many KV blocks a rank can hold, and the model length that follows."""

import math
import pathlib

import psutil
import torch

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError
from moed.config.kv_layout import KVLayout
from moed.config.memory import step_bytes

# On a CPU the memory is shared with everything else on the machine, and more than this serves more
# than a CPU can compute; `--kv-cache-memory` goes beyond both.
CPU_SHARE = 0.5
CPU_MAX_BYTES = 4 * 1024**3
CPU_FULL_LENGTH_REQUESTS = 32
MIB = 1024**2

CGROUP = pathlib.Path("/sys/fs/cgroup")
CGROUP_FILES = ("memory.max", "memory.current")


def own_num_blocks(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """Blocks that this rank alone would have: as set, or from memory; call it with the model
    loaded. May be 0. Raises `ConfigError` when more are set than there is memory for.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        num_bytes = layout.num_bytes(cache.num_kv_blocks)
        _check_fits(f"num_kv_blocks is {cache.num_kv_blocks}", num_bytes, config, device)
        return cache.num_kv_blocks
    if cache.kv_cache_memory_bytes is not None:
        _check_fits("kv_cache_memory is set", cache.kv_cache_memory_bytes, config, device)
        return layout.num_blocks(cache.kv_cache_memory_bytes)
    return min(layout.num_blocks(_free_bytes(config, device)), num_useful_blocks(config))


def _check_fits(setting: str, num_bytes: int, config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda":
        num_sharing, free = 1, float(torch.cuda.mem_get_info(device)[0])
    else:
        num_sharing, free = config.parallel.num_local_ranks, _free_cpu_bytes()
    if num_bytes * num_sharing > free:
        ranks = f" on each of {num_sharing} ranks" if num_sharing > 1 else ""
        raise ConfigError(
            f"{setting}: that is {num_bytes / MIB:.1f} MiB{ranks}, and {free / MIB:.1f} MiB are "
            "free; lower --num-kv-blocks or --kv-cache-memory"
        )


def num_useful_blocks(config: EngineConfig) -> int:
    """Blocks for S requests of the greatest length, on a CPU for a few dozen: more would hardly be
    used, and on a CPU each one is memory taken from others.
    """
    longest = config.scheduler.max_model_len or config.model.max_position_embeddings
    num_seqs = config.scheduler.max_num_seqs
    if config.parallel.device == "cpu":
        num_seqs = min(num_seqs, CPU_FULL_LENGTH_REQUESTS)
    return num_seqs * -(-longest // config.cache.block_size)


def _free_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        usable = int(total * config.cache.gpu_memory_utilization)
        return max(0, usable - used - step_bytes(config))
    return min(int(_free_cpu_bytes() / config.parallel.num_local_ranks * CPU_SHARE), CPU_MAX_BYTES)


def _free_cpu_bytes() -> float:
    return min(psutil.virtual_memory().available, _container_bytes())


def _container_bytes() -> float:
    """What the container's memory limit leaves, which the machine's free memory does not tell."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in CGROUP_FILES)
    except OSError:
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - int(used))


def decide_max_model_len(config: EngineConfig, num_blocks: int, layout: KVLayout) -> int:
    """L: as set, or for `auto` what fits in `num_blocks` and in the model's positions.

    Raises `ConfigError` when a request of length L could never fit.
    """
    block_size = config.cache.block_size
    capacity = num_blocks * block_size
    scheduler = config.scheduler
    size = layout.num_bytes(num_blocks) / MIB
    fits = f"{num_blocks} KV blocks of {block_size} tokens ({size:.1f} MiB) hold {capacity} tokens"
    if scheduler.max_model_len is not None:
        if scheduler.max_model_len > capacity:
            needed = -(-scheduler.max_model_len // block_size)
            raise ConfigError(
                f"max_model_len is {scheduler.max_model_len}, which needs {needed} KV blocks "
                f"({layout.num_bytes(needed) / MIB:.1f} MiB on each rank), but {fits}; lower "
                "--max-model-len (or give auto), or raise --num-kv-blocks or --kv-cache-memory"
            )
        return scheduler.max_model_len
    longest = min(config.model.max_position_embeddings, capacity)
    if not scheduler.enable_chunked_prefill:
        # A longer prompt would not go in one step.
        longest = min(longest, scheduler.max_num_batched_tokens)
    if longest < 2:
        raise ConfigError(
            f"no request fits: {fits}, and a prompt token and an output token need 2; raise "
            "--num-kv-blocks or --kv-cache-memory"
        )
    return longest
