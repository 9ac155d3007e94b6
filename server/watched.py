"""The agreement and the dispatch backend of a rank that tells its heartbeat of each collective."""

import torch

from moed.config.engine_config import EngineConfig
from moed.config.graphs import EAGER, GraphShape
from moed.dist.agreement import Agreed, Agreement, DecisionKind, RankState
from moed.dist.all2all.base import All2AllBackend, Dispatched
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.server.heartbeats import Heartbeat


class WatchedAgreement(Agreement):
    """Counts from the group's first step on."""

    def __init__(self, groups: Groups, config: EngineConfig, heartbeat: Heartbeat) -> None:
        super().__init__(groups, config.parallel, config.digest())
        self._heartbeat = heartbeat
        heartbeat.begin_group()

    def agree(
        self,
        step_id: int,
        num_tokens: int,
        state: RankState,
        wake_number: int,
        graph: GraphShape = EAGER,
        has_prompts: bool = False,
    ) -> Agreed:
        """See `Agreement.agree`."""
        self._heartbeat.begin_step(step_id, wake_number)
        self._heartbeat.enter()
        agreed = super().agree(step_id, num_tokens, state, wake_number, graph, has_prompts)
        self._heartbeat.leave()
        if agreed.decision.kind is not DecisionKind.RUN:
            self._heartbeat.sleep()
        return agreed


class WatchedBackend:
    """An `All2AllBackend` around another one."""

    def __init__(self, backend: All2AllBackend, heartbeat: Heartbeat) -> None:
        self.capabilities = backend.capabilities
        self.traffic = backend.traffic
        self._backend = backend
        self._heartbeat = heartbeat

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dp_metadata: DPMetadata,
    ) -> Dispatched:
        """See `All2AllBackend.dispatch`."""
        self._heartbeat.enter()
        dispatched = self._backend.dispatch(hidden, topk_ids, topk_weights, dp_metadata)
        self._heartbeat.leave()
        return dispatched

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See `All2AllBackend.combine`."""
        self._heartbeat.enter()
        combined = self._backend.combine(expert_output, dispatched)
        self._heartbeat.leave()
        return combined

    def close(self) -> None:
        self._backend.close()
