"""What the environment and files may hold."""

import logging
from pathlib import Path
from typing import Any

import pytest

from moed.config.cli import parse
from moed.config.errors import ConfigError
from moed.config.names import settings
from moed.config.options import Setting
from moed.config.settings import ServeSettings
from moed.config.sources import read_file, read_variables


def serve(*words: str) -> ServeSettings:
    command = parse(["serve", *words])
    assert command.settings is not None
    return command.settings


def sample(setting: Setting) -> tuple[str, Any]:
    """A text other than the default, and what it should become."""
    if setting.option.choices:
        other = next(c for c in setting.option.choices if c != setting.default)
        return other, other
    if setting.is_switch:
        return ("false", False) if setting.default else ("true", True)
    if setting.is_list:
        return "one,two", ("one", "two")
    if setting.annotation in (str, str | None):
        return "text", "text"
    if setting.annotation in (float, float | None):
        return ("0.5", 0.5) if setting.option.maximum == 1 else ("7.5", 7.5)
    number = int(setting.option.maximum or (setting.option.minimum or 0) + 7)
    return str(number), number


@pytest.mark.parametrize("name", [name for name in settings() if name != "config"])
def test_every_setting_has_an_environment_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = sample(settings()[name])
    assert getattr(serve(), name) != value
    monkeypatch.setenv(f"MOED_{name.upper()}", text)
    assert getattr(serve(), name) == value


def test_unknown_variable_is_an_error_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_MAX_NUM_SEQ", "3")
    with pytest.raises(ConfigError, match=r"MOED_MAX_NUM_SEQ; did you mean MOED_MAX_NUM_SEQS\?"):
        serve()


def test_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_PORT", "")
    assert serve().port == 8000


def test_wrong_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_PORT", "x")
    with pytest.raises(ConfigError, match=r"environment MOED_PORT.*'x'.*whole number"):
        serve()


def test_two_names_of_one_setting_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MOED_API_KEY and .*MOED_API_KEYS"):
        read_variables({"MOED_API_KEY": "a", "MOED_API_KEYS": "b"})


def test_keys_are_never_in_messages_or_representations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_API_KEY", "s3cret,t0ken")
    settings = serve()
    assert settings.api_keys == ("s3cret", "t0ken")
    assert "s3cret" not in repr(settings)


KUBERNETES = {
    "MOED_SERVICE_HOST": "10.0.0.1",
    "MOED_SERVICE_PORT": "8000",
    "MOED_SERVICE_PORT_HTTP": "8000",
    "MOED_PORT": "tcp://10.0.0.1:8000",
    "MOED_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "MOED_PORT_8000_TCP_PROTO": "tcp",
    "MOED_PORT_8000_TCP_ADDR": "10.0.0.1",
    "MOED_HEADLESS_SERVICE_HOST": "10.0.0.2",
    "MOED_HEADLESS_PORT": "tcp://10.0.0.2:8000",
}


def test_service_links_of_kubernetes_are_ignored_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        assert serve().port == 8000
    assert len(caplog.records) == 1
    for name in KUBERNETES:
        assert name in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "name",
    [
        "MOED_ENABLE_MOE_DP_CHUNK",
        "MOED_MOE_DP_CHUNK_SIZE",
        "VLLM_ENABLE_MOE_DP_CHUNK",
        "VLLM_MOE_DP_CHUNK_SIZE",
    ],
)
def test_variables_of_the_removed_chunking_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "256")
    with pytest.raises(ConfigError, match=rf"{name} was removed.*--max-num-batched-tokens"):
        serve()


def test_other_variables_of_other_servers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert serve().log_level == "info"


FILES = {
    "moed.yaml": "port: 1\nmax-model-len: 8K\nserved_model_name: [a, b]\naccess_log: no\nseed:\n",
    "moed.json": '{"port": 1, "max_model_len": "8K", "served-model-name": ["a", "b"],'
    ' "access_log": false}',
    "moed.toml": 'port = 1\nmax-model-len = "8K"\nserved_model_name = ["a", "b"]\n'
    "access_log = false\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    settings = serve("--config", str(tmp_path / name))
    assert (settings.port, settings.max_model_len, settings.access_log) == (1, 8192, False)
    assert settings.served_model_name == ("a", "b")
    assert settings.seed == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "prot: 1", r"a\.yaml: unknown setting 'prot'; did you mean port\?"),
        ("a.yaml", "fault_injection: x", "unknown setting"),
        ("a.yaml", "moe_dp_chunk_size: 1", r"moe_dp_chunk_size.*removed.*--max-num-batched-tokens"),
        ("a.yaml", "enable-moe-dp-chunk: 1", r"removed.*--max-num-batched-tokens"),
        ("a.yaml", "config: b.yaml", "cannot name another"),
        ("a.yaml", "port: 1\nkv_cache_memory: 1\nkv-cache-memory: 2", "second time"),
        ("a.yaml", "- port", "holds a list"),
        ("a.yaml", "port: [", "cannot be parsed"),
        ("a.toml", "port = ", "cannot be parsed"),
        ("a.yaml", "port: true", r"file .*a\.yaml.*must not be true or false"),
        ("a.yaml", "port: [1]", r"whole number"),
        ("a.yaml", "served_model_name: {a: 1}", "name or a list of names"),
        ("a.yaml", "max_model_len: 1.5", "whole number"),
    ],
)
def test_wrong_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        serve("--config", str(tmp_path / name))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*nowhere\.yaml"):
        serve("--config", str(tmp_path / "nowhere.yaml"))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_file(str(tmp_path / "empty.yaml")) == {}


def test_a_revision_that_yaml_reads_as_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("revision: 0123\n")
    with pytest.raises(ConfigError, match="revision .*in quotes"):
        serve("--config", str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("revision: '0123'\n")
    assert serve("--config", str(tmp_path / "a.yaml")).revision == "0123"


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "moed.yaml"
    path.write_text("port: 8000\nhost: localhost\nport: 9000\n")
    with pytest.raises(ConfigError, match=r"(?s)'port' is given twice.*line 3"):
        read_file(str(path))


def test_an_empty_secret_is_not_taken_for_none() -> None:
    with pytest.raises(ConfigError, match=r"MOED_API_KEY is set and empty.*unset it"):
        read_variables({"MOED_API_KEY": ""})
