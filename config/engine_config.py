"""The frozen configuration that every process receives: what `resolve()` returns.

The token budget B is written once, in `SchedulerConfig.max_num_batched_tokens`;
`FusedMoEConfig.max_num_tokens` is filled from it by `EngineConfig.fused_moe` and by nothing else.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from moed.config.capabilities import ActivationFormat, BackendCapabilities, Rebuild
from moed.config.cors import CorsConfig
from moed.config.errors import ConfigError
from moed.config.expert_placement import ExpertPlacement
from moed.config.explained import Explained
from moed.config.nodes import NodesConfig
from moed.config.tls import TlsConfig


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes there are and how rows travel between them."""

    data_parallel_size: int
    tensor_parallel_size: int
    """T: processes of one DP rank. Global ranks are dp-major: DP rank x T + member."""
    enable_expert_parallel: bool
    """Experts are spread over all processes; otherwise each holds a shard of every expert."""
    num_local_ranks: int
    """Processes on this node."""
    backend: BackendCapabilities
    device: str
    """"cpu" or "cuda"."""
    num_threads: int
    """CPU threads of each rank: the node's cores divided by its ranks, unless set."""
    distributed_timeout_s: float
    """Bound on any one collective."""
    agreement_backend: str
    """"nccl" or "gloo": what carries the records of each step's agreement."""
    expert_placement: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """From `--expert-placement`: by decoder layer and rank, the experts there; None: linear."""

    @property
    def world_size(self) -> int:
        """All processes: DP x TP. Rows are exchanged between all of them."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Processes over which experts are spread: all of them, or 1 when each holds a shard."""
        return self.world_size if self.enable_expert_parallel else 1

    @property
    def placement_digest(self) -> str:
        """Of `expert_placement`: "linear" where there is none."""
        if self.expert_placement is None:
            return "linear"
        return hashlib.sha256(repr(self.expert_placement).encode()).hexdigest()[:16]

    @property
    def use_batched_dp_moe(self) -> bool:
        """True when more than one EP rank exchanges rows in the batched activation format."""
        batched = self.backend.activation_format is ActivationFormat.BATCHED
        return self.expert_parallel_size > 1 and batched


@dataclass(frozen=True)
class SchedulerConfig:
    """What one rank may run in one step."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP: ClassVar[int] = 256
    """When `ParallelConfig.use_batched_dp_moe`: each expert's buffer holds EP x B rows there."""
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 256

    max_num_batched_tokens: int
    """B: the most tokens one rank runs in one step."""
    max_num_seqs: int
    """S: the most requests one rank runs in one step."""
    max_model_len: int | None
    """L: prompt plus output tokens of one request. None: `auto`, decided at start by what fits."""
    enable_chunked_prefill: bool
    max_num_queued_requests: int
    """Requests waiting on all ranks together before new ones are refused with 503."""


@dataclass(frozen=True)
class FusedMoEConfig:
    """Sizes of one MoE layer; `max_num_tokens` sizes every dispatch buffer."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_local_slots: int
    """e, experts that a process has room for: its even share, or more where some have copies."""
    max_num_tokens: int
    """B, from `SchedulerConfig.max_num_batched_tokens`."""
    expert_parallel_size: int
    """Processes that exchange rows: DP x TP."""
    dispatch_capacity: int
    """N, rows that one process sends at most: its share of B, ceil(B / TP), raised until R x N is
    the multiple that the backend asks for.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        expert_parallel_size: int,
        max_num_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        received_rows_multiple: int = 1,
        num_local_slots: int | None = None,
    ) -> None:
        if max_num_tokens is None or max_num_tokens < 1:
            raise ConfigError(
                f"FusedMoEConfig.max_num_tokens is {max_num_tokens}: it must be a number of at "
                "least 1, and comes from SchedulerConfig.max_num_batched_tokens "
                "(--max-num-batched-tokens)"
            )
        for name, value in {
            "num_experts": num_experts,
            "top_k": top_k,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_local_slots": num_local_slots or -(-num_experts // expert_parallel_size),
            "max_num_tokens": max_num_tokens,
            "expert_parallel_size": expert_parallel_size,
            "dispatch_capacity": _dispatch_capacity(
                max_num_tokens, tensor_parallel_size, expert_parallel_size, received_rows_multiple
            ),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def max_num_received_rows(self) -> int:
        """Bound on the rows one rank's experts see in one step, after an all-gather."""
        return self.expert_parallel_size * self.dispatch_capacity


def _dispatch_capacity(num_tokens: int, num_members: int, num_ranks: int, multiple: int) -> int:
    capacity = -(-num_tokens // num_members)
    # N must be a multiple of what the number of ranks does not bring along itself.
    step = multiple // math.gcd(multiple, num_ranks)
    return -(-capacity // step) * step


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint: where it lies, and the sizes that every part needs, under one name each."""

    path: str
    """Local directory that holds config.json and the safetensors files."""
    model: str
    """What the user gave: a directory or `org/name`."""
    revision: str | None
    served_model_names: tuple[str, ...]
    architecture: str
    """`architectures[0]` of config.json, such as `Qwen3MoeForCausalLM`."""
    model_type: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    load_format: str
    """"auto" (safetensors) or "dummy" (random weights, from `seed`)."""
    seed: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    max_position_embeddings: int
    hf_config: Mapping[str, Any] = field(repr=False)
    """config.json as read, for the family's own fields; of a multimodal model the text part."""
    generation_config: Mapping[str, Any] = field(repr=False)
    """generation_config.json as read, or empty."""
    eos_token_ids: tuple[int, ...] = ()
    whole_model_type: str | None = None
    """Of the multimodal model whose text part this is; None: there are no other parts."""


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of one rank."""

    block_size: int
    """Tokens per block."""
    num_kv_blocks: int | None
    """Blocks per rank; None: from the memory below."""
    kv_cache_memory_bytes: int | None
    """Bytes per rank; None: what `gpu_memory_utilization` leaves (on a CPU: a share of the free
    memory).
    """
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    """Full blocks are shared by requests with the same beginning."""


@dataclass(frozen=True)
class RunnerConfig:
    """How a rank executes its steps."""

    attention_backend: str
    """"sdpa" or "flashinfer"; or "auto": FlashInfer, if it works at the start on all ranks, else
    sdpa.
    """
    cpu_kernels: str
    """"native", "torch" or "auto": what computes on a CPU. Ranks may differ."""
    graph_buckets: tuple[int, ...]
    """Rows of the graphs that decode steps replay, none above B; empty: all steps are eager."""
    step_ahead: bool
    """The next step is scheduled before the tokens of the last one are known. Ranks may differ."""


@dataclass(frozen=True)
class ObservabilityConfig:
    """What the processes tell of their work."""

    log_format: str
    """"text", or "json" for one object a line."""
    log_requests: bool
    """A JSON line for each request that has ended."""
    metrics_compat: str
    """"vllm": every series that vLLM has is shown under its name too; or "none"."""
    otlp_traces_endpoint: str | None
    """Where spans of requests are sent; None: nowhere."""


@dataclass(frozen=True)
class RecoveryConfig:
    """What happens when a process is lost."""

    on_rank_failure: str
    """"recover" or "exit"."""
    max_restarts: int
    """Most recoveries in `moed.server.restarts.WINDOW_S`."""
    recovery_timeout_s: float
    """How long requests are held meanwhile."""
    step_timeout_s: float
    """How long a rank may keep the others waiting in one step."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP front end and the manners of the processes."""

    host: str
    port: int
    shutdown_timeout_s: float
    """How long SIGTERM lets open requests finish."""
    drain_delay_s: float
    """Of that time, how long new requests are still served while readiness is red already."""
    api_keys: tuple[str, ...] = field(repr=False)
    max_logprobs: int
    log_level: str
    access_log: bool
    strict_params: bool
    """Refuse a request that names an unknown parameter, instead of warning in its answer."""
    tool_call_parser: str
    """A name of `moed.config.chat_formats`, "auto" or "none"."""
    reasoning_parser: str
    max_request_bytes: int
    """Largest request body; a larger one is refused with 413."""
    admin_api_keys: tuple[str, ...] = field(repr=False)
    """They open everything; once there is one, nothing else opens the admin routes."""
    request_timeout_s: float | None
    """From a request's arrival to the end of its answer; None: no bound."""
    slow_reader_timeout_s: float
    """How long a client may read nothing of what waits for it."""
    tls: TlsConfig | None
    """None: plain http://."""
    cors: CorsConfig | None
    """None: no page of another origin may call from a browser."""
    observability: ObservabilityConfig
    recovery: RecoveryConfig


@dataclass(frozen=True)
class EngineConfig:
    """Everything, resolved: each default decided and each cross-check passed."""

    model: ModelConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    runner: RunnerConfig
    server: ServerConfig
    nodes: NodesConfig | None = None
    """None: all ranks are on this node."""
    explained: tuple[Explained, ...] = ()
    """Every setting with its origin, for people who ask; nothing is decided by it."""
    fault_injection: str | None = None
    """Faults that tests ask for (`MOED_FAULT_INJECTION`); None in any real use."""

    @property
    def recovers(self) -> bool:
        """Whether open requests outlive the loss of a rank."""
        return self.server.recovery.on_rank_failure == "recover"

    @property
    def stays_in_process(self) -> bool:
        """Whether ranks outlive the loss of another one."""
        return self.recovers and self.parallel.backend.rebuild is Rebuild.IN_PROCESS

    @property
    def fused_moe(self) -> FusedMoEConfig:
        """The MoE layer's sizes, with B carried over from the scheduler: the only place that does
        so.
        """
        return FusedMoEConfig(
            num_experts=self.model.num_experts,
            top_k=self.model.top_k,
            hidden_size=self.model.hidden_size,
            intermediate_size=self.model.moe_intermediate_size,
            expert_parallel_size=self.parallel.world_size,
            max_num_tokens=self.scheduler.max_num_batched_tokens,
            tensor_parallel_size=self.parallel.tensor_parallel_size,
            received_rows_multiple=self.parallel.backend.received_rows_multiple,
            num_local_slots=self.placement().num_local_slots,
        )

    def placement(self, layer: int = 0) -> ExpertPlacement:
        """Where the experts of decoder layer `layer` lie. All layers have as many slots."""
        return self._placements[0 if len(self._placements) == 1 else layer]

    @cached_property
    def _placements(self) -> tuple[ExpertPlacement, ...]:
        """By decoder layer, or one for all; made once, since reports of the experts' load ask for
        each of them every second.
        """
        parallel, num_experts = self.parallel, self.model.num_experts
        if not parallel.enable_expert_parallel:
            return (ExpertPlacement.sharded(num_experts, parallel.world_size),)
        table = parallel.expert_placement
        if table is None:
            return (ExpertPlacement.linear(num_experts, parallel.world_size),)
        slots = max(len(held) for ranks in table for held in ranks)
        return tuple(ExpertPlacement(held, num_experts, least_local_slots=slots) for held in table)

    def agreement_items(self) -> dict[str, str]:
        """What must be equal on all ranks, as text: compared at start, key by key."""
        items = {
            "max_num_batched_tokens": self.scheduler.max_num_batched_tokens,
            "max_num_seqs": self.scheduler.max_num_seqs,
            "max_model_len": self.scheduler.max_model_len,
            "enable_chunked_prefill": self.scheduler.enable_chunked_prefill,
            "block_size": self.cache.block_size,
            "all2all_backend": self.parallel.backend.name,
            "data_parallel_size": self.parallel.data_parallel_size,
            "tensor_parallel_size": self.parallel.tensor_parallel_size,
            "enable_expert_parallel": self.parallel.enable_expert_parallel,
            "expert_placement": self.parallel.placement_digest,
            "device": self.parallel.device,
            "agreement_backend": self.parallel.agreement_backend,
            "attention_backend": self.runner.attention_backend,
            "graph_buckets": self.runner.graph_buckets,
            "step_ahead": self.runner.step_ahead,
            "model": self.model.model,
            "revision": self.model.revision,
            "nnodes": 1 if self.nodes is None else self.nodes.num_nodes,
        }
        files = {"hf_config": "config.json", "generation_config": "generation_config.json"}
        for entry in fields(ModelConfig):
            value = getattr(self.model, entry.name)
            if entry.name in files:
                items |= {f"{files[entry.name]}: {key}": value[key] for key in value}
            elif entry.name not in ("path", "model", "revision", "served_model_names"):
                items[entry.name] = value
        return {key: repr(value) for key, value in items.items()}

    def digest(self) -> int:
        """63-bit number over `agreement_items`, carried in every step's record."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.agreement_items().items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
