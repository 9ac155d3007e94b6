"""`--expert-placement FILE`: which rank holds which experts, by layer, as JSON.

    {"layers": {"0": [[0, 1, 2], [2, 3, 4]], "1": [[0, 3, 4], [1, 2, 3]]}}

By decoder layer, and in it by rank (DP rank x tensor-parallel size + member): the experts that lie
there. An expert may lie on several ranks: they share its rows. `"all_layers": [[...], [...]]`
stands for all layers that are not named; else those are linear. `moed place` writes such files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moed.config.engine_config import ModelConfig
from moed.config.errors import ConfigError
from moed.config.expert_placement import ExpertPlacement

KEYS = ("layers", "all_layers")
# What `moed place` adds for people to read.
COMMENTS = ("num_experts", "num_ranks", "imbalance")

Held = tuple[tuple[int, ...], ...]


def read_placement(path: str, model: ModelConfig, num_ranks: int) -> tuple[Held, ...]:
    """By decoder layer and rank: the experts there.

    Raises `ConfigError` naming the layer, for a file that does not fit the model or the launch.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the expert placement {path}: {error}") from None
    if not isinstance(content, dict) or not content.keys() & set(KEYS):
        raise ConfigError(
            f"the expert placement {path} is not an object with 'layers' or 'all_layers'"
        )
    if unknown := content.keys() - {*KEYS, *COMMENTS}:
        raise ConfigError(
            f"the expert placement {path} has the key {min(unknown)!r}; known are "
            f"{', '.join((*KEYS, *COMMENTS))}"
        )
    layers = content.get("layers", {})
    if not isinstance(layers, Mapping):
        raise ConfigError(f"{path}: 'layers' is not an object of layer numbers and lists")
    known = {str(layer) for layer in range(model.num_layers)}
    if strange := layers.keys() - known:
        raise ConfigError(
            f"{path} places experts of layer {min(strange)}, and {model.model} has the layers 0 to "
            f"{model.num_layers - 1}"
        )
    default = ExpertPlacement.linear(model.num_experts, num_ranks).held
    if "all_layers" in content:
        default = _checked(content["all_layers"], path, "all_layers", model, num_ranks)
    return tuple(
        _checked(layers[str(layer)], path, f"layer {layer}", model, num_ranks)
        if str(layer) in layers
        else default
        for layer in range(model.num_layers)
    )


def _checked(lists: Any, path: str, where: str, model: ModelConfig, num_ranks: int) -> Held:
    is_lists = isinstance(lists, list) and all(
        isinstance(experts, list) and all(type(expert) is int for expert in experts)
        for experts in lists
    )
    if not is_lists:
        raise ConfigError(f"{path}, {where}: it must be a list of expert ids for each rank")
    if len(lists) != num_ranks:
        raise ConfigError(
            f"{path}, {where}: it places experts on {len(lists)} ranks, and there are {num_ranks}"
        )
    held = tuple(map(tuple, lists))
    try:
        ExpertPlacement(held, model.num_experts)
    except ValueError as error:
        raise ConfigError(f"{path}, {where}: {error}") from None
    return held
