"""The one number: its defaults, its way through the configuration, and every refusal.

Legend: B max_num_batched_tokens, S max_num_seqs, L max_model_len.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from moed.config import machine
from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import EngineConfig, FusedMoEConfig, SchedulerConfig
from moed.config.errors import ConfigError
from moed.config.resolve import resolve, resolve_and_explain
from moed.config.settings import ServeSettings

Make = Callable[..., EngineConfig]


@pytest.fixture
def make(write_checkpoint: Any, capabilities: Mapping[str, BackendCapabilities]) -> Make:
    path = write_checkpoint()

    def resolved(**settings: Any) -> EngineConfig:
        return resolve(ServeSettings(model=str(path), device="cpu", **settings), capabilities)

    return resolved


def test_the_two_defaults() -> None:
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP == 256


@pytest.mark.parametrize(
    ("ranks", "backend", "tokens", "batched"),
    [
        (1, "auto", 2048, False),
        (2, "auto", 2048, False),
        (2, "allgather_reducescatter", 2048, False),
        (2, "batched", 256, True),
        # One rank exchanges nothing, whatever format the backend has.
        (1, "batched", 2048, False),
    ],
)
def test_default_follows_the_declared_format(
    make: Make, ranks: int, backend: str, tokens: int, batched: bool
) -> None:
    config = make(data_parallel_size=ranks, all2all_backend=backend)
    assert config.parallel.use_batched_dp_moe is batched
    assert config.scheduler.max_num_batched_tokens == tokens
    assert config.scheduler.max_num_seqs == 256
    assert config.fused_moe.max_num_tokens == tokens
    assert config.fused_moe.max_num_received_rows == ranks * tokens


@pytest.mark.parametrize("tokens", [1, 7, 255, 256, 257, 4096])
def test_a_given_number_reaches_the_moe_layer_unchanged(make: Make, tokens: int) -> None:
    config = make(data_parallel_size=3, all2all_backend="batched", max_num_batched_tokens=tokens)
    assert config.scheduler.max_num_batched_tokens == tokens
    assert config.fused_moe.max_num_tokens == tokens
    assert config.agreement_items()["max_num_batched_tokens"] == str(tokens)


@pytest.mark.parametrize("given", [None, 0, -1])
def test_a_moe_layer_without_a_number_is_refused(given: int | None) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens"):
        FusedMoEConfig(
            num_experts=8,
            top_k=2,
            hidden_size=128,
            intermediate_size=64,
            expert_parallel_size=1,
            max_num_tokens=given,
        )


def test_the_default_number_of_requests_is_lowered_to_the_budget(
    write_checkpoint: Any, capabilities: Mapping[str, BackendCapabilities]
) -> None:
    settings = ServeSettings(model=str(write_checkpoint()), max_num_batched_tokens=64)
    resolution = resolve_and_explain(settings, capabilities, weights=False)
    assert resolution.config.scheduler.max_num_seqs == 64
    assert resolution.decided["max_num_seqs"] == (64, "lowered to max_num_batched_tokens 64")


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, ("8", "16")),
        # The budget's implicit default is the smaller number here: 256.
        (
            {"max_num_seqs": 1024, "data_parallel_size": 2, "all2all_backend": "batched"},
            ("256 (the default with batched", "1024"),
        ),
        ({"max_num_seqs": 4096}, ("2048 (the default)", "4096")),
    ],
)
def test_more_requests_than_tokens_are_refused_with_both_numbers_and_the_fix(
    make: Make, settings: dict[str, Any], numbers: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    message = str(caught.value)
    tokens, seqs = numbers
    assert f"max_num_batched_tokens is {tokens}" in message
    assert f"max_num_seqs is {seqs}" in message
    assert f"--max-num-batched-tokens to at least {seqs}" in message
    assert "lower --max-num-seqs" in message


def test_as_many_requests_as_tokens_are_fine(make: Make) -> None:
    config = make(max_num_seqs=1024, max_num_batched_tokens=1024, all2all_backend="batched")
    assert config.scheduler.max_num_seqs == 1024


def test_without_chunked_prefill_a_longer_prompt_could_never_run(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 256 .*is 64.*at least 256.*most 64"):
        make(max_num_batched_tokens=64, max_model_len=256, enable_chunked_prefill=False)
    make(max_num_batched_tokens=256, max_model_len=256, enable_chunked_prefill=False)
    make(max_num_batched_tokens=64, max_model_len=256)


def test_without_chunked_prefill_an_automatic_length_says_that_the_budget_bounds_it(
    write_checkpoint: Any, capabilities: Mapping[str, BackendCapabilities]
) -> None:
    settings = ServeSettings(
        model=str(write_checkpoint()), max_num_batched_tokens=64, enable_chunked_prefill=False
    )
    resolution = resolve_and_explain(settings, capabilities, weights=False)
    assert "at most 64" in resolution.decided["max_model_len"][1]


@pytest.mark.parametrize(
    ("backend", "tokens", "message"),
    [
        ("hidden_2048", None, r"hidden sizes 2048, 4096; that of .* is 128"),
        ("one_expert", None, r"at most 1 experts; .* chooses 2"),
        ("at_most_512", 513, r"max_num_batched_tokens is 513.*at most 512.*to at most 512"),
        ("at_most_512", None, r"max_num_batched_tokens is 2048.*at most 512"),
    ],
)
def test_limits_of_the_backend(make: Make, backend: str, tokens: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(data_parallel_size=2, all2all_backend=backend, max_num_batched_tokens=tokens)


def test_the_limit_itself_is_allowed(make: Make) -> None:
    make(data_parallel_size=2, all2all_backend="at_most_512", max_num_batched_tokens=512)


@pytest.mark.parametrize(
    ("backend", "arithmetic"),
    [
        # 2 x 4096 rows x 128 x 4 bytes x 2 = 8 MiB; times two ranks 16 MiB.
        ("all2allv", ("2 ranks x 4096 tokens x hidden size 128 x 4 bytes x 2", "8.0 MiB", "16.0")),
        # Four local experts, each with room for all rows: 32 MiB and 64 MiB.
        ("batched", ("4 local experts x 2 ranks x 4096 tokens", "32.0 MiB", "64.0 MiB")),
    ],
)
def test_more_than_the_memory_is_refused_with_the_arithmetic(
    make: Make, backend: str, arithmetic: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "data_parallel_size": 2,
        "all2all_backend": backend,
        "max_num_batched_tokens": 4096,
    }
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64 * 1024**2)
    make(**settings)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10 * 1024**2)
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    for part in (*arithmetic, "10.0 MiB are free", "lower --max-num-batched-tokens"):
        assert part in str(caught.value)
