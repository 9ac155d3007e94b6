"""Defaults that depend on something else, and settings that contradict each other."""

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moed.config import environ, machine
from moed.config.capabilities import BackendCapabilities
from moed.config.cli import parse
from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, ModelError
from moed.config.resolve import resolve, resolve_and_explain
from moed.config.settings import ServeSettings
from moed.config.show import show

Make = Callable[..., EngineConfig]


@pytest.fixture
def make(write_checkpoint: Any, capabilities: Mapping[str, BackendCapabilities]) -> Make:
    path = write_checkpoint()

    def resolved(**settings: Any) -> EngineConfig:
        return resolve(ServeSettings(**{"model": str(path), **settings}), capabilities)

    return resolved


@pytest.mark.parametrize(("ranks", "name"), [(1, "local"), (2, "all2allv"), (5, "all2allv")])
def test_automatic_backend(make: Make, ranks: int, name: str) -> None:
    assert make(data_parallel_size=ranks).parallel.backend.name == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"all2all_backend": "nccl"}, r"'nccl': available are auto, all2allv, allgather_re.*local"),
        (
            {"all2all_backend": "local", "data_parallel_size": 2},
            r"'local'.*size 2 x .* are 2.*all2allv",
        ),
        ({"all2all_backend": "gpu_only", "data_parallel_size": 2}, r"runs on cuda.*'cpu'.*all2al"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size is 3.* 4 attention heads .*1, 2, 4"),
        (
            {
                "enable_expert_parallel": False,
                "data_parallel_size": 2,
                "all2all_backend": "all2allv",
            },
            r"enable_expert_parallel is off.*'all2allv'.*one of allgather_reducescatter",
        ),
        ({"num_kv_blocks": 4, "kv_cache_memory": 5}, r"num_kv_blocks is 4 and kv_cache_memory is"),
        (
            {"num_kv_blocks": 15, "block_size": 16, "max_model_len": 256},
            r"max_model_len is 256.*15 x block_size 16 hold 240 tokens.*at least 16",
        ),
        ({"max_model_len": 1025}, r"max_model_len is 1025.*1024 positions"),
    ],
)
def test_contradictions_name_both_values(
    make: Make, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(device="cpu", **settings)
    assert caught.value.exit_code == 78


def test_blocks_that_just_hold_the_length(make: Make) -> None:
    config = make(num_kv_blocks=16, block_size=16, max_model_len=256)
    assert config.cache.num_kv_blocks == 16
    assert config.scheduler.max_model_len == 256


def test_contradictions_are_told_before_the_model_is_read(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make(model="org/name", max_num_batched_tokens=8, max_num_seqs=16)


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "threads"),
    [(8, 2, None, 4), (8, 3, None, 2), (2, 4, None, 1), (8, 2, 7, 7)],
)
def test_threads(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    given: int | None,
    threads: int,
) -> None:
    monkeypatch.setattr(environ, "available_cores", lambda: cores)
    assert make(data_parallel_size=ranks, num_threads=given).parallel.num_threads == threads


@pytest.mark.parametrize(("found", "device"), [("/dev/nvidia0", "cuda"), (None, "cpu")])
def test_automatic_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, found: str | None, device: str
) -> None:
    monkeypatch.setattr(machine, "nvidia_device", lambda: found)
    assert make().parallel.device == device


def test_a_given_device_is_taken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_device", lambda: "/dev/nvidia0")
    assert make(device="cpu").parallel.device == "cpu"


def test_a_gpu_that_is_not_there_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_device", lambda: None)
    with pytest.raises(ConfigError, match="no NVIDIA device.*--device cpu"):
        make(device="cuda")


def test_served_names(make: Make, write_checkpoint: Any) -> None:
    path = str(write_checkpoint())
    assert make().model.served_model_names == (path,)
    assert make(served_model_name=("a", "b")).model.served_model_names == ("a", "b")


def test_bundled_model(
    capabilities: Mapping[str, BackendCapabilities],
    write_checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_checkpoint()
    monkeypatch.setattr("moed.config.resolve.bundled_checkpoint", lambda: path)
    for given in (None, "moed-demo"):
        model = resolve(ServeSettings(model=given), capabilities).model
        assert (model.model, model.served_model_names) == ("moed-demo", ("moed-demo",))
        assert model.path == str(path)


def test_key_file(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two\none\n")
    config = make(api_key_file=str(file), api_keys=("three",))
    assert config.server.api_keys == ("three", "one", "two")
    assert "three" not in repr(config)


def test_a_key_file_without_keys_does_not_open_the_door(make: Make, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        make(api_key_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot read the API key file"):
        make(api_key_file=str(tmp_path / "missing"))


def test_every_setting_reaches_the_configuration(make: Make) -> None:
    config = make(
        host="0.0.0.0",
        port=0,
        shutdown_timeout=5.5,
        distributed_timeout=9.0,
        max_num_queued_requests=3,
        max_logprobs=4,
        max_request_bytes=5000,
        strict_params=True,
        access_log=False,
        log_level="debug",
        gpu_memory_utilization=0.5,
        kv_cache_memory=1000,
        block_size=8,
        dtype="float16",
        load_format="dummy",
        seed=11,
        revision="main",
        fault_injection="kill:rank=1:step=2",
    )
    server, cache, model = config.server, config.cache, config.model
    assert (server.host, server.port, server.shutdown_timeout_s) == ("0.0.0.0", 0, 5.5)
    assert (server.max_logprobs, server.max_request_bytes) == (4, 5000)
    assert (server.strict_params, server.access_log, server.log_level) == (True, False, "debug")
    assert config.parallel.distributed_timeout_s == 9.0
    assert config.scheduler.max_num_queued_requests == 3
    assert (cache.gpu_memory_utilization, cache.kv_cache_memory_bytes) == (0.5, 1000)
    assert cache.block_size == 8
    assert (model.dtype, model.load_format, model.seed) == ("float16", "dummy", 11)
    assert model.revision == "main"
    assert config.fault_injection == "kill:rank=1:step=2"


def test_the_configuration_is_frozen_and_travels_to_spawned_processes(make: Make) -> None:
    config = make(data_parallel_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scheduler.max_num_seqs = 3  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.digest() == config.digest()


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"port": 1, "log_level": "debug"}, True),
        ({"max_num_batched_tokens": 300}, False),
        ({"seed": 1}, False),
        ({"dtype": "bfloat16"}, False),
        ({"all2all_backend": "allgather_reducescatter"}, False),
    ],
)
def test_digest_tells_what_ranks_must_share(
    make: Make, settings: dict[str, Any], same: bool
) -> None:
    plain = make(data_parallel_size=2)
    assert (make(data_parallel_size=2, **settings).digest() == plain.digest()) is same


def shown(
    words: list[str], capabilities: Mapping[str, BackendCapabilities]
) -> dict[str, tuple[str, str]]:
    command = parse(["config", "show", *words])
    assert command.settings is not None
    resolution = resolve_and_explain(command.settings, capabilities, weights=False)
    text = show(command.settings, command.origins, resolution)
    rows = [[part for part in line.split("  ") if part] for line in text.splitlines()]
    return {row[0]: (row[1].strip(), row[2].strip()) for row in rows}


def test_show_tells_every_value_and_where_it_came_from(
    write_checkpoint: Any,
    capabilities: Mapping[str, BackendCapabilities],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "moed.yaml"
    file.write_text("max_logprobs: 3\n")
    monkeypatch.setenv("MOED_API_KEY", "s3cret")
    monkeypatch.setenv("MOED_MAX_NUM_BATCHED_TOKENS", "64")
    monkeypatch.setattr(machine, "nvidia_device", lambda: None)
    words = [str(write_checkpoint()), "-dp", "2", "--config", str(file), "--dtype", "auto"]
    rows = shown(words, capabilities)
    assert rows["data_parallel_size"] == ("2", "flag -dp")
    assert rows["max_num_batched_tokens"] == ("64", "environment MOED_MAX_NUM_BATCHED_TOKENS")
    assert rows["max_logprobs"] == ("3", f"file {file}")
    assert rows["port"] == ("8000", "default")
    assert rows["max_num_seqs"] == ("64", "auto (lowered to max_num_batched_tokens 64)")
    assert rows["all2all_backend"] == ("all2allv", "auto (2 ranks)")
    assert rows["device"] == ("cpu", "auto (no NVIDIA device found)")
    assert rows["dtype"] == ("float32", "auto (the checkpoint's, flag --dtype)")
    assert rows["max_model_len"][0] == "auto"
    assert "s3cret" not in str(rows)
    assert rows["api_keys"] == ("(1 hidden)", "environment MOED_API_KEY")
    assert "fault_injection" not in rows
    assert rows["moe_max_received_rows"][0] == "128"


def test_show_calls_a_plain_default_so(
    write_checkpoint: Any, capabilities: Mapping[str, BackendCapabilities]
) -> None:
    rows = shown([str(write_checkpoint())], capabilities)
    assert rows["max_num_batched_tokens"] == ("2048", "default")
    assert rows["max_num_seqs"] == ("256", "default")


def test_a_missing_model_is_told(make: Make) -> None:
    with pytest.raises(ModelError, match="no such directory: './nowhere'"):
        make(model="./nowhere")


def test_a_drain_delay_leaves_time_to_finish(make: Make) -> None:
    assert make(shutdown_timeout=5, drain_delay=4.5).server.drain_delay_s == 4.5
    with pytest.raises(ConfigError, match="drain_delay is 5 s, of the 5 s in shutdown_timeout"):
        make(shutdown_timeout=5, drain_delay=5)
