"""What a configuration asks of DeepEP, in the numbers that its limits are about.

Legend: B tokens of a data-parallel rank in a step; N = `dispatch_capacity`, those of them that one
expert-parallel rank sends.
"""

from dataclasses import dataclass

from moed.config.capabilities import DeepEPMode
from moed.config.engine_config import EngineConfig
from moed.config.machine import Machine


@dataclass(frozen=True)
class Question:
    """The numbers that the limits are about."""

    backend: str
    mode: DeepEPMode
    model: str
    num_ranks: int
    tensor_parallel_size: int
    num_tokens: int
    """N."""
    num_experts: int
    top_k: int
    hidden_size: int
    dtype: str
    num_nodes: int
    qp_depth: str | None

    @property
    def name(self) -> str:
        return f"all2all_backend {self.backend!r}"

    @property
    def ranks_per_node(self) -> int:
        return -(-self.num_ranks // self.num_nodes)

    @property
    def num_local_experts(self) -> int:
        return -(-self.num_experts // self.num_ranks)


def question(config: EngineConfig, machine: Machine) -> Question:
    """The question that `config` asks of its backend, which calls DeepEP."""
    moe, mode = config.fused_moe, config.parallel.backend.deep_ep_mode
    assert mode is not None
    return Question(
        backend=config.parallel.backend.name,
        mode=mode,
        model=config.model.model,
        num_ranks=moe.expert_parallel_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        num_tokens=dispatch_capacity(config),
        num_experts=num_dispatched_experts(config),
        top_k=moe.top_k,
        hidden_size=moe.hidden_size,
        dtype=config.model.dtype,
        num_nodes=machine.num_nodes,
        qp_depth=machine.qp_depth,
    )


def num_dispatched_experts(config: EngineConfig) -> int:
    """Experts as DeepEP counts them: with copies, the slots of all ranks."""
    moe = config.fused_moe
    if config.parallel.expert_placement is None:
        return moe.num_experts
    return moe.expert_parallel_size * moe.num_local_slots


def dispatch_capacity(config: EngineConfig) -> int:
    """N: what one rank of the expert-parallel group sends at most in one step."""
    return config.fused_moe.dispatch_capacity
