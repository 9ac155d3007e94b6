"""The experts of one rank: one implementation for each format and device."""

from moed.moe.experts.base import SWIGLU, Activation, Experts, ExpertWeights, swiglu
from moed.moe.experts.choice import can_compute, experts_to_fill, make_experts
from moed.moe.experts.reference import reference_batched_experts, reference_experts
from moed.moe.experts.torch_batched import TorchBatchedExperts
from moed.moe.experts.torch_standard import TorchExperts

__all__ = [
    "SWIGLU",
    "Activation",
    "ExpertWeights",
    "Experts",
    "TorchBatchedExperts",
    "TorchExperts",
    "can_compute",
    "experts_to_fill",
    "make_experts",
    "reference_batched_experts",
    "reference_experts",
    "swiglu",
]
