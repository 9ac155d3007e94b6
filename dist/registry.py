"""Every dispatch backend: what it declares, and how it is made. Imports no torch until one is made.

A new backend is one entry here and one file in `all2all/`; nothing else keeps a list of names.
"""

from typing import TYPE_CHECKING

from moed.config import deep_ep_limits as limits
from moed.config.capabilities import (
    ActivationFormat,
    BackendCapabilities,
    DeepEPMode,
    Rebuild,
)
from moed.config.engine_config import FusedMoEConfig
from moed.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from moed.config.expert_placement import ExpertPlacement
    from moed.dist.all2all.base import All2AllBackend
    from moed.dist.groups import Groups

_DECLARATIONS = (
    BackendCapabilities(
        name="local",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=False,
        applies_router_weights=False,
        collectives_per_layer=0,
        graph_safe=True,
        rebuild=Rebuild.IN_PROCESS,
        description="one rank holds all experts; no communication",
    ),
    BackendCapabilities(
        name="allgather_reducescatter",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=2,
        graph_safe=True,
        rebuild=Rebuild.IN_PROCESS,
        can_shard_experts=True,
        description="every rank sees the rows of all ranks; ragged sizes, no padding",
    ),
    BackendCapabilities(
        name="all2allv",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=3,
        graph_safe=True,
        rebuild=Rebuild.IN_PROCESS,
        description="a row travels once to each rank that holds one of its experts",
    ),
    BackendCapabilities(
        name="deepep_low_latency",
        activation_format=ActivationFormat.BATCHED,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=True,
        collectives_per_layer=4,
        graph_safe=True,
        rebuild=Rebuild.RESTART,
        max_top_k=limits.LOW_LATENCY_MAX_TOP_K,
        received_rows_multiple=limits.LOW_LATENCY_ROWS_MULTIPLE,
        deep_ep_mode=DeepEPMode.LOW_LATENCY,
        description="DeepEP's low-latency kernels, for decode; each expert has room for all rows",
    ),
    BackendCapabilities(
        name="deepep_high_throughput",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=4,
        graph_safe=False,
        rebuild=Rebuild.RESTART,
        deep_ep_mode=DeepEPMode.HIGH_THROUGHPUT,
        description="DeepEP's high-throughput kernels, for long prompts",
    ),
    BackendCapabilities(
        name="deepep_v2",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=4,
        graph_safe=False,
        rebuild=Rebuild.RESTART,
        deep_ep_mode=DeepEPMode.ELASTIC,
        description="DeepEP's ElasticBuffer, for prompts and decode",
    ),
)


def capabilities() -> dict[str, BackendCapabilities]:
    """The declarations by name, in the order in which help lists them."""
    return {declaration.name: declaration for declaration in _DECLARATIONS}


def create_backend(
    name: str,
    groups: "Groups",
    placement: "ExpertPlacement",
    fused_moe: FusedMoEConfig,
    dtype: "torch.dtype",
    device: "torch.device",
) -> "All2AllBackend":
    """Make the backend `name` for this process, once. Raises `ConfigError` for an unknown name, or
    when it cannot serve this many ranks or cannot be loaded. Collective.
    """
    declared = capabilities()
    if name not in declared:
        raise ConfigError(f"all2all backend {name!r} is unknown; known are {', '.join(declared)}")
    if placement.num_ranks != groups.world_size:
        raise ConfigError(
            f"experts are placed on {placement.num_ranks} ranks, but there are {groups.world_size}"
        )
    if name == "local":
        from moed.dist.all2all.local import Local

        return Local(declared[name], groups)
    arguments = (declared[name], groups, placement, fused_moe, dtype, device)
    return _constructor(name)(*arguments)


def _constructor(name: str) -> "Callable[..., All2AllBackend]":
    match name:
        case "allgather_reducescatter":
            from moed.dist.all2all.allgather import AllGatherReduceScatter

            return AllGatherReduceScatter
        case "all2allv":
            return _all2allv
        case "deepep_low_latency":
            from moed.dist.all2all.deepep_low_latency import DeepEPLowLatency

            return DeepEPLowLatency
        case "deepep_high_throughput":
            from moed.dist.all2all.deepep_high_throughput import DeepEPHighThroughput

            return DeepEPHighThroughput
        case _:
            from moed.dist.all2all.deepep_v2 import DeepEPV2

            return DeepEPV2


def _all2allv(
    declared: BackendCapabilities,
    groups: "Groups",
    placement: "ExpertPlacement",
    fused_moe: FusedMoEConfig,
    dtype: "torch.dtype",
    device: "torch.device",
) -> "All2AllBackend":
    """Through shared memory where all ranks are on one host and can, else by torch.distributed."""
    from moed.dist.all2all.all2allv import All2AllV
    from moed.dist.all2all.all2allv_host import open_for

    on_host = open_for(declared, groups, placement, fused_moe, dtype)
    if on_host is not None:
        return on_host
    return All2AllV(declared, groups, placement, fused_moe, dtype, device)
