"""Every dispatch backend: what it declares, and how it is made. Imports no torch until one is made.

A new backend is one entry here and one file in `all2all/`; nothing else keeps a list of names.
"""

from typing import TYPE_CHECKING

from moed.config.capabilities import ActivationFormat, BackendCapabilities
from moed.config.engine_config import FusedMoEConfig
from moed.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moed.dist.all2all.base import All2AllBackend
    from moed.dist.groups import Groups
    from moed.dist.placement import ExpertPlacement

_DECLARATIONS = (
    BackendCapabilities(
        name="local",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=False,
        applies_router_weights=False,
        collectives_per_layer=0,
        graph_safe=True,
        description="one rank holds all experts; no communication",
    ),
    BackendCapabilities(
        name="allgather_reducescatter",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=2,
        graph_safe=False,
        description="every rank sees the rows of all ranks; ragged sizes, no padding",
    ),
    BackendCapabilities(
        name="all2allv",
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cpu", "cuda"}),
        requires_expert_parallel=True,
        applies_router_weights=False,
        collectives_per_layer=3,
        graph_safe=False,
        description="a row travels once to each rank that holds one of its experts",
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
    when it cannot serve this many ranks.
    """
    from moed.dist.all2all.all2allv import All2AllV
    from moed.dist.all2all.allgather import AllGatherReduceScatter
    from moed.dist.all2all.local import Local

    declared = capabilities()
    if name not in declared:
        raise ConfigError(f"all2all backend {name!r} is unknown; known are {', '.join(declared)}")
    if placement.num_ranks != groups.world_size:
        raise ConfigError(
            f"experts are placed on {placement.num_ranks} ranks, but there are {groups.world_size}"
        )
    if name == "local":
        return Local(declared[name], groups)
    if name == "allgather_reducescatter":
        return AllGatherReduceScatter(declared[name], groups, placement, fused_moe, dtype, device)
    return All2AllV(declared[name], groups, placement, fused_moe, dtype, device)
