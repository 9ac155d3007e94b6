"""Which implementation serves a format, a device and a weight format."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moed.config.capabilities import ActivationFormat
from moed.config.errors import ConfigError
from moed.moe import native
from moed.moe.block_scaled import WeightFormat
from moed.moe.experts.base import Experts, ExpertWeights

if TYPE_CHECKING:
    from moed.moe.experts.native import NativeExperts


@dataclass(frozen=True)
class _Choice:
    """One implementation; the table below prefers the first that can run here."""

    activation_format: ActivationFormat
    device_type: str
    weight_format: WeightFormat
    make: Callable[[ExpertWeights], Experts]
    needs_triton: bool
    capability: tuple[int, int]
    """CUDA's compute capability, at least."""
    needs_native: bool = False

    def obstacle(self, weights: ExpertWeights | None = None) -> str | None:
        """Why it cannot run here, or not with `weights`, in words."""
        if self.needs_native:
            return _native_obstacle(weights)
        if self.needs_triton and weights is not None and not weights.is_plain_swiglu:
            return "the Triton kernels know no biases of experts and no activation but SwiGLU"
        if self.needs_triton and importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if self.device_type == "cuda" and torch.cuda.is_available():
            found = torch.cuda.get_device_capability()
            if found < self.capability:
                wanted = ".".join(map(str, self.capability))
                return f"the GPU has compute capability {found[0]}.{found[1]}, wanted is {wanted}"
        return None


def _native_obstacle(weights: ExpertWeights | None) -> str | None:
    from moed.moe.experts.native import obstacle

    if native.library() is None:
        return "there are no native kernels here"
    return None if weights is None else obstacle(weights)


# Each imports what it needs when it is made: triton is absent from CPU installs.


def _torch_standard(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.torch_standard import TorchExperts

    return TorchExperts(weights)


def _native_standard(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.native import NativeExperts

    found = native.library()
    assert found is not None
    return NativeExperts.of(found, weights)


def _torch_batched(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.torch_batched import TorchBatchedExperts

    return TorchBatchedExperts(weights)


def _torch_grouped(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.torch_grouped import TorchGroupedExperts

    return TorchGroupedExperts(weights)


def _triton_standard(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.triton_standard import TritonExperts

    return TritonExperts(weights)


def _triton_batched(weights: ExpertWeights) -> Experts:
    from moed.moe.experts.triton_batched import TritonBatchedExperts

    return TritonBatchedExperts(weights)


_STANDARD, _BATCHED = ActivationFormat.STANDARD, ActivationFormat.BATCHED
_PLAIN, _FP8 = WeightFormat.PLAIN, WeightFormat.FP8_BLOCK
_ANY, _AMPERE, _ADA = (0, 0), (8, 0), (8, 9)

_CHOICES = (
    _Choice(_STANDARD, "cpu", _PLAIN, _native_standard, False, _ANY, needs_native=True),
    _Choice(_STANDARD, "cpu", _PLAIN, _torch_standard, False, _ANY),
    _Choice(_BATCHED, "cpu", _PLAIN, _torch_batched, False, _ANY),
    _Choice(_STANDARD, "cuda", _PLAIN, _triton_standard, True, _AMPERE),
    _Choice(_STANDARD, "cuda", _PLAIN, _torch_grouped, False, _AMPERE),
    _Choice(_STANDARD, "cuda", _PLAIN, _torch_standard, False, _ANY),
    _Choice(_BATCHED, "cuda", _PLAIN, _triton_batched, True, _AMPERE),
    _Choice(_STANDARD, "cuda", _FP8, _triton_standard, True, _ADA),
    _Choice(_BATCHED, "cuda", _FP8, _triton_batched, True, _ADA),
)


def can_compute(
    activation_format: ActivationFormat, device_type: str, weight_format: WeightFormat
) -> bool:
    """Whether any implementation can run here."""
    wanted = (activation_format, device_type, weight_format)
    return any(
        (choice.activation_format, choice.device_type, choice.weight_format) == wanted
        and choice.obstacle() is None
        for choice in _CHOICES
    )


def experts_to_fill(
    activation_format: ActivationFormat,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> "NativeExperts | None":
    """Those that take plain SwiGLU weights one expert at a time, without all of them beside each
    other before; `sizes`: experts, D and I. None where `make_experts` takes others.
    """
    from moed.moe.experts.native import NativeExperts, can_fill

    library = native.library()
    if activation_format is not ActivationFormat.STANDARD or library is None:
        return None
    return NativeExperts(library, *sizes, dtype) if can_fill(device, dtype, sizes) else None


def make_experts(
    activation_format: ActivationFormat, device_type: str, weights: ExpertWeights
) -> Experts:
    """The implementation for a format and device. Raises `ConfigError` when there is none that
    can run here.
    """
    wanted = (activation_format, device_type, weights.format)
    obstacles = []
    for choice in _CHOICES:
        if (choice.activation_format, choice.device_type, choice.weight_format) != wanted:
            continue
        obstacle = choice.obstacle(weights)
        if obstacle is None:
            return choice.make(weights)
        obstacles.append(obstacle)
    raise ConfigError(
        f"no experts for the {activation_format} format with {weights.format} weights on "
        f"{device_type}{': ' if obstacles else ''}{'; '.join(obstacles)}. Choose another "
        "--all2all-backend"
    )
