"""What a dispatch backend declares of itself: the type only, so that `resolve()` can read it.

The registry that holds one declaration for each backend is `moed.dist.registry`; it imports no
torch either.
"""

from dataclasses import dataclass
from enum import StrEnum


class ActivationFormat(StrEnum):
    """How rows lie in memory after dispatch."""

    STANDARD = "standard"
    """`[rows, hidden]`, rows in any order, with the local expert ids of each row."""
    BATCHED = "batched"
    """`[local_experts, capacity, hidden]` and a count for each expert."""


class DeepEPMode(StrEnum):
    """Which of DeepEP's interfaces a backend calls; each has limits and buffers of its own, in
    `deep_ep_limits`.
    """

    LOW_LATENCY = "low_latency"
    HIGH_THROUGHPUT = "high_throughput"
    ELASTIC = "elastic"


class Rebuild(StrEnum):
    """What a new group of ranks costs after one of them was lost."""

    IN_PROCESS = "in_process"
    """The other ranks keep their weights: what the backend holds can be let go and made again."""
    RESTART = "restart"
    """All ranks start again: it may have taken the device with it."""


@dataclass(frozen=True)
class BackendCapabilities:
    """One backend's declaration, read by `resolve()`, the launch checks and `FusedMoE`."""

    name: str
    activation_format: ActivationFormat
    devices: frozenset[str]
    """Device types it runs on: "cpu", "cuda"."""
    requires_expert_parallel: bool
    """False only for `local`, which serves an EP group of one rank."""
    applies_router_weights: bool
    """True when `combine` multiplies by the router weights; otherwise the experts do. Never both.
    """
    collectives_per_layer: int
    """`torch.distributed` calls of one dispatch plus one combine: the same on every rank and for
    any rows. (In a graph, where all ranks have as many rows, all2allv makes one less.)
    """
    graph_safe: bool
    """No host synchronisation inside once all ranks have as many rows, so that a CUDA graph may
    hold it.
    """
    rebuild: Rebuild
    """After the loss of a rank."""
    hidden_sizes: frozenset[int] | None = None
    """Hidden sizes it supports; None means any."""
    max_top_k: int | None = None
    max_tokens_per_rank: int | None = None
    """Largest capacity (tokens per rank and step); None means bounded by memory alone."""
    received_rows_multiple: int = 1
    """Ranks x capacity must be a multiple of this."""
    can_shard_experts: bool = False
    """Serves without expert parallelism, where every rank holds a part of each expert."""
    description: str = ""
    deep_ep_mode: DeepEPMode | None = None
    """None: needs no library but torch."""

    @property
    def library(self) -> str | None:
        """The package it calls, beyond torch."""
        return None if self.deep_ep_mode is None else "deep_ep"
