"""`moed config show`: every resolved value and where it came from."""

from collections.abc import Mapping
from typing import Any

from moed.config.budget import PLAIN_DEFAULT
from moed.config.engine_config import EngineConfig
from moed.config.explained import DERIVED, Explained
from moed.config.memory import moe_bytes_per_rank
from moed.config.names import settings
from moed.config.options import Setting
from moed.config.resolve import Resolution
from moed.config.settings import ServeSettings
from moed.config.sizes import format_bytes

HEADER = ("setting", "value", "from")


def show(values: ServeSettings, origins: Mapping[str, str], resolution: Resolution) -> str:
    """A table: setting, value, and flag, environment, file, default or auto."""
    found = [(e.name, _text(e.value), e.origin) for e in explain(values, origins, resolution)]
    rows = [HEADER, *found]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "".join(
        f"{name:<{name_width}}  {value:<{value_width}}  {origin}\n" for name, value, origin in rows
    )


def explain(
    values: ServeSettings, origins: Mapping[str, str], resolution: Resolution
) -> tuple[Explained, ...]:
    """Every setting, then what follows from them; without the hidden ones that nobody has set."""
    found = [
        _explained(setting, values, origins, resolution)
        for setting in settings().values()
        if setting.name in origins or not setting.option.hidden
    ]
    derived = [Explained(*entry, DERIVED) for entry in _derived(resolution.config).items()]
    return (*found, *derived)


def _explained(
    setting: Setting, values: ServeSettings, origins: Mapping[str, str], resolution: Resolution
) -> Explained:
    name = setting.name
    value = getattr(values, name)
    origin = origins.get(name, "default")
    if name in resolution.decided:
        value, why = resolution.decided[name]
        asked = "" if name not in origins else f", {origins[name]}"
        origin = "default" if why == PLAIN_DEFAULT else f"auto ({why}{asked})"
    if setting.option.secret and value is not None:
        value = f"({1 if isinstance(value, str) else len(value)} hidden)"
    return Explained(name, value, origin)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _derived(config: EngineConfig) -> dict[str, str]:
    """What follows from the settings and is good to see beside them."""
    moe = config.fused_moe
    return {
        "checkpoint": config.model.path,
        "model_type": config.model.model_type,
        "expert_parallel_size": str(moe.expert_parallel_size),
        "use_batched_dp_moe": _text(config.parallel.use_batched_dp_moe),
        "moe_max_num_tokens": f"{moe.max_num_tokens} (max_num_batched_tokens)",
        "moe_max_received_rows": str(moe.max_num_received_rows),
        "moe_row_buffers": f"{format_bytes(moe_bytes_per_rank(config))} per rank",
        "api_keys_total": str(len(config.server.api_keys)),
    }
