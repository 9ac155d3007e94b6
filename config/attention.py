"""What attention runs on: torch's own (`sdpa`) for any model, or FlashInfer's kernels on GPUs."""

from moed.config.engine_config import ModelConfig
from moed.config.errors import ConfigError
from moed.config.machine import Machine
from moed.config.weight_bytes import latent_attention
from moed.config.windows import window_layers

AUTO, FLASHINFER, SDPA = "auto", "flashinfer", "sdpa"
BACKENDS = (AUTO, FLASHINFER, SDPA)

# What its kernels are compiled for; other sizes are left to torch.
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
# Model types whose softmax has a learned score more for each head.
WITH_SINKS = frozenset({"gpt_oss"})

SINK_MASK_NUMBERS = 2**26
"""Of one mask for the query heads of a KV head, where each head has scores of its own in it."""
LATENT_EXPANDED_BYTES = 64 * 2**20
"""K and V that latent attention makes of a context at a time, for a group of heads."""
WORKSPACE_BYTES = 512 * 2**20
"""Of all wrappers together: parts of sums, where a request's context is split over a GPU."""
PLAN_BYTES = 8 * 2**20
"""Of each wrapper, as the package makes it: what the host decided for a step."""


def choose_attention(
    asked: str, device: str, model: ModelConfig, machine: Machine
) -> tuple[str, str]:
    """The backend, and why: `auto` where FlashInfer may serve, which a rank knows only at its start
    (then torch's does if FlashInfer does not).

    Raises `ConfigError` for what was asked for and cannot be.
    """
    obstacle = _obstacle(device, model, machine)
    if asked == FLASHINFER and obstacle is not None:
        raise ConfigError(
            f"attention_backend {FLASHINFER!r} is unavailable: {obstacle}; available are {AUTO}, "
            f"{SDPA}"
        )
    if asked != AUTO:
        return asked, "as set"
    if obstacle is not None:
        return SDPA, obstacle
    if machine.packages is None:
        return SDPA, f"it is not known whether {FLASHINFER} is installed"
    return AUTO, f"{FLASHINFER}, if it works at the start, else {SDPA}"


def _obstacle(device: str, model: ModelConfig, machine: Machine) -> str | None:
    """Why FlashInfer cannot serve; None where it can, as far as is known."""
    if device != "cuda":
        return f"it needs a GPU, and device is {device!r}"
    if latent_attention(model) is not None:
        return f"{model.model} has latent attention (MLA), which torch computes here"
    if model.model_type in WITH_SINKS:
        return f"{model.model} has attention sinks, which torch computes here"
    windows = window_layers(model)
    if windows is not None and windows.window.is_aligned:
        return f"{model.model} has windows side by side, which torch computes here"
    if model.dtype not in DTYPES:
        return f"it computes in {' or '.join(DTYPES)}, and dtype is {model.dtype}"
    if model.head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"it is used for head dims {dims}, and that of {model.model} is {model.head_dim}"
    if machine.packages is not None and FLASHINFER not in machine.packages:
        return f"the package {FLASHINFER} is not installed"
    return None
