"""What one rank needs besides weights: KV cache, dispatch buffers and workspace, each with the
arithmetic written out, and the sum of all against a GPU.

Legend: R ranks of the expert-parallel group, S requests, N tokens that one rank sends
(`dispatch_capacity`).
"""

from dataclasses import dataclass

from moed.config import deep_ep_limits as limits
from moed.config.attention_memory import attention_items
from moed.config.capabilities import ActivationFormat, BackendCapabilities, DeepEPMode
from moed.config.deep_ep_question import dispatch_capacity, num_dispatched_experts
from moed.config.engine_config import EngineConfig
from moed.config.items import Item, total
from moed.config.machine import Machine
from moed.config.weight_bytes import (
    BYTES_PER_NUMBER,
    weight_bytes,
)

ID_BYTES = 4
WEIGHT_BYTES = 4
FLOAT_BYTES = 4
ROW_PART_ALIGNMENT = 8


def num_useful_tokens(config: EngineConfig) -> int:
    """More tokens than this no request would ever use: S requests of the greatest length."""
    longest = config.scheduler.max_model_len or config.model.max_position_embeddings
    block = config.cache.block_size
    return config.scheduler.max_num_seqs * limits.round_up(longest, block)


def num_received_rows(config: EngineConfig, backend: BackendCapabilities) -> tuple[int, str]:
    """The most rows that one rank's experts can hold in one step, and how they are reckoned."""
    moe, tokens = config.fused_moe, dispatch_capacity(config)
    ranks = moe.expert_parallel_size
    text = f"{ranks} {'rank' if ranks == 1 else 'ranks'} x {tokens} tokens"
    if backend.activation_format is ActivationFormat.BATCHED and ranks > 1:
        # Every local expert has room for every row.
        num_local = moe.num_local_slots
        return num_local * ranks * tokens, f"{num_local} local experts x {text}"
    return ranks * tokens, text


def moe_bytes_per_rank(config: EngineConfig) -> int:
    """Bytes of one MoE layer's received rows and of its results, at most, on one rank."""
    rows, _ = num_received_rows(config, config.parallel.backend)
    return rows * config.model.hidden_size * BYTES_PER_NUMBER[config.model.dtype] * 2


def dispatch_items(
    config: EngineConfig, backend: BackendCapabilities, machine: Machine
) -> list[Item]:
    """The buffers that `backend` would hold for this configuration; none for one rank alone."""
    match backend.deep_ep_mode:
        case DeepEPMode.LOW_LATENCY:
            return _low_latency(config)
        case DeepEPMode.HIGH_THROUGHPUT:
            return _high_throughput(config)
        case DeepEPMode.ELASTIC:
            return _elastic(config, machine)
        case None:
            return _collectives(config, backend)


def _low_latency(config: EngineConfig) -> list[Item]:
    moe, tokens = config.fused_moe, dispatch_capacity(config)
    experts = num_dispatched_experts(config)
    needed = limits.low_latency_rdma_bytes(tokens, moe.hidden_size, experts)
    heap = limits.low_latency_heap_bytes(tokens, moe.hidden_size, experts)
    text = (
        f"RDMA {needed} B for {experts} experts x {tokens} tokens x hidden "
        f"{moe.hidden_size}, two of each; heap in steps of 512 MiB"
    )
    return [Item("NVSHMEM heap", heap, text), _library_workspace()]


def _high_throughput(config: EngineConfig) -> list[Item]:
    moe = config.fused_moe
    ranks, hidden = moe.expert_parallel_size, moe.hidden_size
    if ranks not in limits.HIGH_THROUGHPUT_RANKS:
        return [_library_workspace()]
    nvl = limits.high_throughput_nvl_bytes(ranks, hidden)
    rdma = limits.high_throughput_rdma_bytes(ranks, hidden)
    text = f"{nvl} B: queues of {ranks} ranks, hidden {hidden}, any number of tokens"
    items = [Item("NVLink buffer", nvl, text)]
    if rdma:
        heap = limits.round_up(rdma, limits.NVSHMEM_HEAP_STEP_BYTES)
        items.append(Item("NVSHMEM heap", heap, f"RDMA {rdma} B; heap in steps of 512 MiB"))
    return [*items, _library_workspace()]


def _elastic(config: EngineConfig, machine: Machine) -> list[Item]:
    moe, tokens = config.fused_moe, dispatch_capacity(config)
    ranks = moe.expert_parallel_size
    per_node = -(-ranks // machine.num_nodes)
    needed = limits.elastic_bytes(
        ranks, tokens, moe.hidden_size, moe.top_k, gpus_per_node=max(per_node, 1)
    )
    text = f"{needed} B for {ranks} ranks x {tokens} tokens x hidden {moe.hidden_size}"
    fixed = limits.ELASTIC_WORKSPACE_BYTES
    return [Item("elastic buffer", needed, text), Item("library workspace", fixed, "fixed")]


def _library_workspace() -> Item:
    return Item("library workspace", limits.WORKSPACE_BYTES, "fixed")


def _collectives(config: EngineConfig, backend: BackendCapabilities) -> list[Item]:
    """Rows on the wire at one time: sent ones and returned sums; received ones are workspace."""
    moe, tokens = config.fused_moe, dispatch_capacity(config)
    ranks = moe.expert_parallel_size
    if ranks == 1 or not backend.requires_expert_parallel:
        return []
    row, text = _wire_row(config)
    copies, what = min(ranks, moe.top_k), "min(ranks, top-k)"
    if backend.name.startswith("allgather"):
        copies, what = ranks, "ranks"
    sent = copies * tokens
    returned = sent * moe.hidden_size * BYTES_PER_NUMBER[config.model.dtype]
    return [
        Item("sent rows", sent * row, f"{copies} ({what}) x {tokens} tokens x {text}"),
        Item("returned sums", returned, f"{copies} x {tokens} tokens x hidden {moe.hidden_size}"),
    ]


def _wire_row(config: EngineConfig) -> tuple[int, str]:
    """Hidden values, ids and weights side by side."""
    moe, size = config.fused_moe, BYTES_PER_NUMBER[config.model.dtype]
    hidden = limits.round_up(moe.hidden_size * size, ROW_PART_ALIGNMENT)
    routing = limits.round_up(ID_BYTES * moe.top_k, ROW_PART_ALIGNMENT)
    routing += limits.round_up(WEIGHT_BYTES * moe.top_k, ROW_PART_ALIGNMENT)
    return hidden + routing, f"({hidden} + {routing}) B"


def workspace_items(config: EngineConfig, backend: BackendCapabilities) -> list[Item]:
    """Tensors of one MoE layer, of attention and of logits at their largest, when every token of
    every rank chooses experts of this one.
    """
    moe, size = config.fused_moe, BYTES_PER_NUMBER[config.model.dtype]
    rows, text = num_received_rows(config, backend)
    received = rows * moe.hidden_size * size
    items = [Item("received rows", received, f"{text} x hidden {moe.hidden_size} x {size} B")]
    inner = 2 * moe.intermediate_size * size
    if backend.activation_format is ActivationFormat.BATCHED:
        made = rows * inner + received
        what = f"{rows} rows x (2 x {moe.intermediate_size} + {moe.hidden_size}) x {size} B"
        items.append(Item("gate, up and results", made, what))
    else:
        num_local = moe.num_local_slots
        choices = min(moe.top_k, num_local)
        pair = moe.hidden_size * (size + FLOAT_BYTES) + inner
        what = f"{rows} rows x {choices} choices x {pair} B (rows, gate and up, sums in float32)"
        items.append(Item("rows by expert", rows * choices * pair, what))
    return [*items, *attention_items(config), _logits(config)]


def _logits(config: EngineConfig) -> Item:
    rows, vocabulary = config.scheduler.max_num_seqs, config.model.vocab_size
    row = vocabulary * (BYTES_PER_NUMBER[config.model.dtype] + FLOAT_BYTES)
    return Item("logits", rows * row, f"{rows} requests x vocabulary {vocabulary}, and in float32")


def step_bytes(config: EngineConfig) -> int:
    """What a step takes and gives back, at most: to be kept free when the KV cache is made."""
    backend = config.parallel.backend
    taken = total(workspace_items(config, backend))
    if backend.deep_ep_mode is None:
        taken += total(_collectives(config, backend))
    return taken


@dataclass(frozen=True)
class RankMemory:
    """The sums of one rank, and what they leave for the KV cache."""

    weights: int
    dispatch: int
    workspace: int
    usable: int | None
    """Share of a GPU's memory; None: not known."""

    @property
    def fixed(self) -> int:
        return self.weights + self.dispatch + self.workspace

    @property
    def left(self) -> int | None:
        """For the KV cache; below 0 when not even the rest fits."""
        return None if self.usable is None else self.usable - self.fixed


def rank_memory(config: EngineConfig, machine: Machine) -> RankMemory:
    """With the configuration's own backend."""
    backend, usable = config.parallel.backend, None
    if config.parallel.device == "cuda" and machine.gpu_memory_bytes is not None:
        usable = int(machine.gpu_memory_bytes * config.cache.gpu_memory_utilization)
    return RankMemory(
        weights=sum(weight_bytes(config).values()),
        dispatch=total(dispatch_items(config, backend, machine)),
        workspace=total(workspace_items(config, backend)),
        usable=usable,
    )
