"""One rank, all experts: nothing travels."""

import torch

from moed.config.capabilities import BackendCapabilities
from moed.config.errors import ConfigError
from moed.dist.all2all.base import Dispatched
from moed.dist.all2all.traffic import Traffic
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups


class Local:
    """Backend `local`: global and local expert ids are the same."""

    def __init__(self, capabilities: BackendCapabilities, groups: Groups) -> None:
        if groups.world_size != 1:
            raise ConfigError(
                f"backend local serves one rank, and there are {groups.world_size}: choose "
                "all2allv or allgather_reducescatter with --all2all-backend"
            )
        self.capabilities = capabilities
        self.traffic = Traffic(torch.zeros(1, dtype=torch.int64), 0, 0)

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`: the rows as they are."""
        return Dispatched(hidden, topk_ids, topk_weights, None, None)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`: the experts' sums as they are."""
        return expert_output

    def close(self) -> None:
        """Nothing is held."""
