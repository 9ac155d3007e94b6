"""Faults on demand: parsed strictly, and only on the rank that they name."""

import pytest

from moed.config.errors import ConfigError, ModelError
from moed.server.faults import Faults


def test_each_rank_has_its_own() -> None:
    text = "raise:rank=1:step=5; fail_load:rank=0;kv_blocks:rank=1:blocks=48"
    first, second = Faults(text, 0, 0), Faults(text, 1, 0)
    with pytest.raises(ModelError, match="fail_load:rank=0"):
        first.on_load()
    second.on_load()
    assert (first.kv_blocks(64), second.kv_blocks(64)) == (64, 48)
    first.on_step(5)
    second.on_step(4)
    with pytest.raises(RuntimeError, match="injected fault raise:rank=1:step=5"):
        second.on_step(5)


@pytest.mark.parametrize("text", [None, "", " ; "])
def test_none(text: str | None) -> None:
    faults = Faults(text, 0, 0)
    faults.on_load()
    faults.on_step(0)
    assert faults.kv_blocks(7) == 7


@pytest.mark.parametrize(
    "text", ["explode:rank=1", "kill:rank=1", "kill:rank=1:step=x", "kill:rank=-1:step=2", "kill"]
)
def test_malformed_text_is_refused_on_every_rank(text: str) -> None:
    with pytest.raises(ConfigError, match="kill:rank=N:step=N, raise:rank=N"):
        Faults(text, 0, 0)
