"""Every Mixture-of-Experts model that `transformers` knows is served, or refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moed.config.errors import ModelError
from moed.config.missing_parts import MISSING_PARTS
from moed.config.model import SERVED_MODEL_TYPES, load_model_config


def field_names(config_class: Any) -> set[str]:
    """Of a config class, its bases, and the parts that have no model type of their own."""
    found = set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        found |= set(vars(base).get("__annotations__", {}))
    parts = (getattr(config_class, "sub_configs", None) or {}).values()
    nameless = [part for part in parts if not getattr(part, "model_type", "") and part.__mro__]
    for part in nameless:
        found |= set().union(*(vars(base).get("__annotations__", {}) for base in part.__mro__))
    return found


def with_experts() -> list[str]:
    """The model types that have a number of experts or the like."""
    return [
        model_type
        for model_type in CONFIG_MAPPING_NAMES
        if any("expert" in name for name in field_names(CONFIG_MAPPING[model_type]))
    ]


def refusal(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load_model_config(
            tmp_path,
            model="m",
            revision=None,
            served_model_names=("m",),
            dtype="auto",
            load_format="auto",
            seed=0,
        )
    return str(caught.value)


def test_each_is_served_or_refused_with_the_part_that_is_missing(tmp_path: Path) -> None:
    known = with_experts()
    assert len(known) > 70 and {"dbrx", "jamba", "qwen3_moe", "llama4_text"} <= set(known)
    for model_type in known:
        if model_type in SERVED_MODEL_TYPES:
            continue
        for config in (
            {"model_type": model_type},
            {"model_type": "whole", "text_config": {"model_type": model_type}},
        ):
            message = refusal(tmp_path, config)
            assert f"'{model_type}', which needs " in message, message
            assert MISSING_PARTS[model_type] in message
            assert "served are deepseek_v2, " in message


def test_nothing_is_both_served_and_refused() -> None:
    assert not set(MISSING_PARTS) & set(SERVED_MODEL_TYPES)
