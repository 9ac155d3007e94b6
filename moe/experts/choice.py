"""Which implementation serves a format and a device."""

from collections.abc import Callable

from moed.config.capabilities import ActivationFormat
from moed.config.errors import ConfigError
from moed.moe.experts.base import Experts, ExpertWeights
from moed.moe.experts.torch_batched import TorchBatchedExperts
from moed.moe.experts.torch_standard import TorchExperts

_IMPLEMENTATIONS: dict[tuple[ActivationFormat, str], Callable[[ExpertWeights], Experts]] = {
    (ActivationFormat.STANDARD, "cpu"): TorchExperts,
    (ActivationFormat.STANDARD, "cuda"): TorchExperts,
    (ActivationFormat.BATCHED, "cpu"): TorchBatchedExperts,
}


def make_experts(
    activation_format: ActivationFormat, device_type: str, weights: ExpertWeights
) -> Experts:
    """The implementation for a format and device. Raises `ConfigError` when there is none."""
    implementation = _IMPLEMENTATIONS.get((activation_format, device_type))
    if implementation is None:
        raise ConfigError(
            f"no experts for the {activation_format} format on {device_type}: choose another "
            "--all2all-backend"
        )
    return implementation(weights)
