"""A decoder of one rank, driven step by step as an engine would, with its own small block table."""

import pathlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from moed.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from moed.config.model import load_model_config
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.registry import capabilities, create_backend
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import local_kv_heads, make_kv_cache
from moed.moe.model import Decoder, load_model
from tests.server_config import SERVER

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 64
B = 256


def engine_config(
    folder: pathlib.Path,
    *,
    backend: str = "local",
    ranks: int = 1,
    dtype: str = "float32",
    load_format: str = "auto",
    seed: int = 0,
    max_num_batched_tokens: int = B,
) -> EngineConfig:
    """What `resolve()` would return for a checkpoint."""
    return EngineConfig(
        model=load_model_config(
            folder,
            model=str(folder),
            revision=None,
            served_model_names=("tests",),
            dtype=dtype,
            load_format=load_format,
            seed=seed,
        ),
        parallel=ParallelConfig(
            data_parallel_size=ranks,
            tensor_parallel_size=1,
            enable_expert_parallel=True,
            num_local_ranks=ranks,
            backend=capabilities()[backend],
            device="cpu",
            num_threads=1,
            distributed_timeout_s=30.0,
            agreement_backend="gloo",
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=64,
            max_model_len=None,
            enable_chunked_prefill=True,
            max_num_queued_requests=1000,
        ),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
        ),
        runner=RunnerConfig(
            attention_backend="sdpa", cpu_kernels="auto", graph_buckets=(), step_ahead=False
        ),
        server=SERVER,
    )


def one_rank(rank: int = 0, world_size: int = 1) -> Groups:
    """Groups for what makes no collectives."""
    return cast(
        Groups,
        SimpleNamespace(
            rank=rank,
            world_size=world_size,
            device_type="cpu",
            local_rank=0,
            is_single_node=False,
            tensor=None,
            tensor_size=1,
            tensor_rank=0,
            data_parallel_rank=rank,
        ),
    )


def load(config: EngineConfig, groups: Groups, device: torch.device = CPU) -> Decoder:
    """The decoder of this rank."""
    placement = config.placement()
    backend = create_backend(
        config.parallel.backend.name,
        groups,
        placement,
        config.fused_moe,
        getattr(torch, config.model.dtype),
        device,
    )
    return load_model(config, groups, backend, lambda _: None)


class Stepper:
    """Runs pieces of requests; their KV blocks are scattered over the pool."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, rank: int = 0, device: torch.device = CPU
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._rank = rank
        dtype = getattr(torch, config.model.dtype)
        self._kv_cache = make_kv_cache(
            config.model,
            local_kv_heads(config.model, config.parallel.tensor_parallel_size),
            NUM_BLOCKS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            dtype,
            device,
        )
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7))
        self._free: list[int] = order.tolist()
        self._blocks: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self._step_id = 0

    @property
    def num_moe_rows(self) -> int:
        return int(self._decoder.moe_rows.sum())

    def step(
        self, pieces: Mapping[str, Sequence[int]], sizes: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """The logits [n, V] of each request's next n tokens. `sizes`: tokens of all ranks."""
        num_tokens = sum(map(len, pieces.values()))
        logits = self.forward(pieces, range(num_tokens), sizes or [num_tokens])
        parts = (
            logits.split_with_sizes([len(tokens) for tokens in pieces.values()]) if pieces else ()
        )
        return dict(zip(pieces, parts, strict=True))

    @torch.inference_mode()
    def forward(
        self, pieces: Mapping[str, Sequence[int]], wanted: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """[J, V]: the logits of the `wanted` rows of the step."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        for request, tokens in pieces.items():
            start = self._num_computed.get(request, 0)
            context = start + len(tokens)
            blocks = self._blocks.setdefault(request, [])
            while len(blocks) * BLOCK_SIZE < context:
                blocks.append(self._free.pop())
            own = range(start, context)
            token_ids += tokens
            positions += own
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in own]
            context_lens.append(context)
            self._num_computed[request] = context
        width = max((len(self._blocks[request]) for request in pieces), default=0)
        tables = [
            self._blocks[request] + [0] * (width - len(self._blocks[request])) for request in pieces
        ]

        def tensor(numbers: Any) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self._device)

        batch = ForwardBatch(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            query_lens=tuple(len(tokens) for tokens in pieces.values()),
            context_lens=tuple(context_lens),
            block_tables=tensor(tables).view(len(pieces), width),
            logits_indices=tensor(list(wanted)),
        )
        self._step_id += 1
        across = torch.tensor(sizes, dtype=torch.int32)
        return self._decoder.forward(
            batch, self._kv_cache, DPMetadata(across, self._rank, self._step_id)
        )
