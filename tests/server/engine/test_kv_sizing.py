"""How many KV blocks, and how long a request may be."""

import pathlib
from typing import Any

import psutil
import pytest
import torch

from moed.config.errors import ConfigError
from moed.config.kv_layout import KVLayout
from moed.server import kv_sizing
from moed.server.kv_sizing import decide_max_model_len, own_num_blocks
from tests.server.engine.configs import engine_config

CPU = torch.device("cpu")


def of(block_bytes: int) -> KVLayout:
    return KVLayout(4, block_bytes, 0, 0, "")


def test_number_then_bytes_then_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_num_blocks(engine_config(num_kv_blocks=7), of(1000), CPU) == 7
    by_bytes = engine_config(num_kv_blocks=None, kv_cache_memory_bytes=5999)
    assert own_num_blocks(by_bytes, of(1000), CPU) == 5
    # S * ceil(L / K) = 8 * ceil(30 / 4) = 64 blocks are all that could ever be used.
    auto = engine_config(num_kv_blocks=None, max_model_len=30)
    assert own_num_blocks(auto, of(1000), CPU) == 64
    # Of 100 requests, 32 count: 32 * 8.
    many = engine_config(num_kv_blocks=None, max_model_len=30, max_num_seqs=100)
    assert own_num_blocks(many, of(1000), CPU) == 256
    # Half of what is free, shared by two ranks: 100 kB / 2 / 2 = 25 blocks.

    class Memory:
        available = 100_000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    shared = engine_config(num_kv_blocks=None, max_model_len=30, ranks=2)
    assert own_num_blocks(shared, of(1000), CPU) == 25


def test_container_limit_counts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sizing, "CGROUP", tmp_path)
    config = engine_config(num_kv_blocks=None, max_model_len=200)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("40000\n")
    unlimited = own_num_blocks(config, of(1000), CPU)
    (tmp_path / "memory.max").write_text("100000\n")
    # Half of the 60 kB that the limit leaves; without it, all 400 useful blocks.
    assert (unlimited, own_num_blocks(config, of(1000), CPU)) == (400, 30)


def test_auto_takes_what_fits() -> None:
    assert decide_max_model_len(engine_config(max_position_embeddings=100), 64, of(10)) == 100
    assert decide_max_model_len(engine_config(max_position_embeddings=100), 10, of(10)) == 40
    whole = engine_config(enable_chunked_prefill=False, max_num_batched_tokens=16)
    assert decide_max_model_len(whole, 64, of(10)) == 16


def test_explicit_length_fits_or_is_refused_with_the_arithmetic() -> None:
    config = engine_config(max_model_len=40)
    assert decide_max_model_len(config, 10, of(2**20)) == 40
    with pytest.raises(ConfigError) as refused:
        decide_max_model_len(config, 9, of(2**20))
    for words in ("max_model_len is 40", "10 KV blocks", "10.0 MiB", "9 KV blocks", "36 tokens"):
        assert words in str(refused.value)


def test_no_blocks_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request fits"):
        decide_max_model_len(engine_config(), 0, of(2**20))


@pytest.mark.parametrize(
    ("asked", "setting"),
    [
        ({"num_kv_blocks": 60}, "num_kv_blocks is 60"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 60 * 2**20}, "kv_cache_memory"),
    ],
)
def test_more_than_there_is_memory_for_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], setting: str
) -> None:
    class Memory:
        available = 100 * 2**20

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert own_num_blocks(engine_config(**asked), of(2**20), CPU) == 60
    # Both ranks are on this machine.
    with pytest.raises(ConfigError) as refused:
        own_num_blocks(engine_config(**asked, ranks=2), of(2**20), CPU)
    for words in (setting, "60.0 MiB on each of 2 ranks", "100.0 MiB are free"):
        assert words in str(refused.value)
