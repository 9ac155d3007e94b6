"""The command line: forms of flags, precedence over environment and file, and what is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moed.config.cli import parse
from moed.config.errors import EXIT_CODES, ConfigError, MoedError, UsageError
from moed.config.help import help_text, num_flags
from moed.config.names import settings
from moed.config.settings import ServeSettings


def serve(*words: str) -> ServeSettings:
    command = parse(["serve", *words])
    assert command.settings is not None
    return command.settings


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--port", "9000"], "port", 9000),
        (["--port=9000"], "port", 9000),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--port", "0"], "port", 0),
        (["-dp", "4"], "data_parallel_size", 4),
        (["-dp=4"], "data_parallel_size", 4),
        (["--data_parallel_size", "4"], "data_parallel_size", 4),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["--enable-expert-parallel"], "enable_expert_parallel", True),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill", False),
        (["--enable-chunked-prefill=false"], "enable_chunked_prefill", False),
        (["--no-access-log"], "access_log", False),
        (["--strict-params"], "strict_params", True),
        (["some/dir"], "model", "some/dir"),
        (["--model", "org/name"], "model", "org/name"),
        (["--max-model-len", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-num-batched-tokens", "2M"], "max_num_batched_tokens", 2 * 1024 * 1024),
        (["--kv-cache-memory", "4GiB"], "kv_cache_memory", 4 * 1024**3),
        (["--kv-cache-memory-bytes", "1000"], "kv_cache_memory", 1000),
        (["--num-threads", "0"], "num_threads", None),
        (["--num-threads", "auto"], "num_threads", None),
        (["--num-threads", "3"], "num_threads", 3),
        (["--dtype", "half"], "dtype", "float16"),
        (["--shutdown-timeout", "0.5"], "shutdown_timeout", 0.5),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
        (["M", "--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
    ],
)
def test_forms_of_flags(words: list[str], name: str, value: Any) -> None:
    assert getattr(serve(*words), name) == value


def test_a_word_after_a_name_is_the_model_when_none_was_given() -> None:
    settings = serve("--served-model-name", "a", "org/name", "--port", "1")
    assert (settings.served_model_name, settings.model) == (("a",), "org/name")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--max-num-batched-token", "3"], ["--max-num-batched-token", "--max-num-batched-tokens"]),
        (["--no-acces-log"], ["--no-access-log"]),
        (["-db", "2"], ["-db", "-dp"]),
        (["--port"], ["--port needs a value"]),
        (["--port", "--host", "x"], ["--port needs a value"]),
        (["--no-access-log=true"], ["takes no value"]),
        (["one", "two"], ["'two'", "'one'"]),
        (["--api-key", "secret"], ["MOED_API_KEY", "--api-key-file"]),
        (["--fault-injection", "kill"], ["unknown flag"]),
    ],
)
def test_unreadable_command_lines_exit_with_64(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        serve(*words)
    assert caught.value.exit_code == 64
    for part in parts:
        assert part in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--port", "70000"], ["port", "flag --port", "'70000'", "from 0 to 65535"]),
        (["--port", "-1"], ["from 0 to 65535"]),
        (["--port", "http"], ["'http'", "whole number"]),
        (["-dp", "0"], ["data_parallel_size", "flag -dp", "at least 1"]),
        (["-dp", "1.5"], ["'1.5'", "whole number"]),
        (["--max-num-batched-tokens", "0"], ["at least 1"]),
        (["--max-model-len", "8q"], ["'8q'", "8k"]),
        (["--max-model-len", "1"], ["at least 2", "auto"]),
        (["--kv-cache-memory", "4 GiBs"], ["4GiB"]),
        (["--dtype", "int8"], ["'int8'", "auto, float32, bfloat16, float16"]),
        (["--device", "tpu"], ["auto, cpu, cuda"]),
        (["--served-model-name", ""], ["flag --served-model-name", "must not be empty"]),
        (["--log-level", "loud"], ["debug, info, warning, error"]),
        (["--gpu-memory-utilization", "1.5"], ["0.01 to 1"]),
        (["--shutdown-timeout", "nan"], ["a number of at least 0"]),
        (["--shutdown-timeout", "inf"], ["a number of at least 0"]),
        (["--access-log=maybe"], ["'maybe'", "true or false"]),
    ],
)
def test_wrong_values_name_the_flag_the_value_and_what_is_allowed(
    words: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(*words)
    for part in parts:
        assert part in str(caught.value)


def test_every_wrong_value_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"port .*; data_parallel_size |data_.*; port "):
        serve("--port", "x", "-dp", "y")


def test_flag_wins_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "moed.yaml"
    file.write_text("port: 1\nmax-num-seqs: 11\nblock_size: 32\n")
    monkeypatch.setenv("MOED_PORT", "2")
    monkeypatch.setenv("MOED_MAX_NUM_SEQS", "12")
    command = parse(["serve", "--config", str(file), "--port", "3"])
    found = command.settings
    assert found is not None
    assert (found.port, found.max_num_seqs, found.block_size, found.max_logprobs) == (3, 12, 32, 20)
    assert command.origins["port"] == "flag --port"
    assert command.origins["max_num_seqs"] == "environment MOED_MAX_NUM_SEQS"
    assert command.origins["block_size"] == f"file {file}"
    assert "max_logprobs" not in command.origins


def test_a_flag_wins_over_a_wrong_value_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_PORT", "not a port")
    assert serve("--port", "3").port == 3


def test_config_file_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "moed.yaml").write_text("port: 1\n")
    monkeypatch.setenv("MOED_CONFIG", str(tmp_path / "moed.yaml"))
    assert serve().port == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-moe-dp-chunk"],
        ["--no-enable-moe-dp-chunk"],
        ["--moe-dp-chunk-size", "256"],
        ["--moe_dp_chunk_size=256"],
    ],
)
def test_flags_of_the_removed_chunking_name_the_replacement(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"removed.*--max-num-batched-tokens") as caught:
        serve(*words)
    assert words[0].partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "help"),
        (["--help"], "help"),
        (["serve", "--help"], "help"),
        (["serve", "--port", "1", "-h"], "help"),
        (["version"], "version"),
        (["--version"], "version"),
        (["config", "show", "--port", "1"], "config show"),
        (["serve"], "serve"),
    ],
)
def test_commands(argv: list[str], name: str) -> None:
    command = parse(argv)
    assert command.name == name
    assert (command.settings is not None) == (name in ("serve", "config show"))
    assert bool(command.text) == (name == "help")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serv"], "did you mean serve"),
        (["org/name"], "did you mean `moed serve`"),
        (["config"], "moed config show"),
        (["version", "x"], "'x'"),
        (["--help=more"], "--help=all"),
    ],
)
def test_unknown_commands(argv: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part.replace("?", r"\?")):
        parse(argv)


def test_help_shows_an_example_first_and_the_common_flags() -> None:
    text = help_text(everything=False)
    assert text.index("moed serve -dp 2") < text.index("usage:")
    shown = [line for line in text.splitlines() if line.startswith("  ") and "--" in line[:34]]
    assert 15 <= len(shown) <= 25
    assert "--max-num-batched-tokens" in text
    assert "--max-logprobs" not in text
    assert "--help=all" in text


def test_help_all_shows_every_flag_and_nothing_hidden() -> None:
    text = help_text(everything=True)
    for setting in settings().values():
        visible = setting.option.on_command_line and not setting.option.hidden
        stem = setting.flag[2:]
        assert (f"--{stem}" in text or f"--[no-]{stem}" in text) == visible, setting.name
    assert all(len(line) <= 100 for line in text.splitlines())


def test_at_most_60_flags() -> None:
    assert num_flags() <= 60


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from moed.config.cli import parse; parse(['--help']);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    for heavy in ("torch", "fastapi", "huggingface_hub", "pydantic", "yaml", "numpy"):
        assert f"'{heavy}'" not in run.stdout


def test_help_tells_every_exit_code_that_an_error_has() -> None:
    def codes(kind: type[MoedError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(each) for each in kind.__subclasses__()))

    listed = {int(code) for entry in EXIT_CODES for code in entry.split(",")}
    assert codes(MoedError) <= listed
    text = help_text(everything=False)
    assert "Exit codes" in text and all(meaning in text for meaning in EXIT_CODES.values())
