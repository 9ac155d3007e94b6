"""MODEL as a directory or a name on the Hub; nothing here uses the network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from moed.config.capabilities import BackendCapabilities
from moed.config.errors import ModelError
from moed.config.hub import fetch
from moed.config.resolve import resolve
from moed.config.settings import ServeSettings

Calls = list[dict[str, Any]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | Exception], Calls]:
    """Replaces the download: returns or raises what is given; the calls are in the list."""

    def answer(result: Path | Exception) -> Calls:
        calls: Calls = []

        def download(repo_id: str, **options: Any) -> str:
            calls.append({"repo_id": repo_id, **options})
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return answer


def response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/org/name"))


def test_a_directory_is_taken_as_it_is(tmp_path: Path, hub: Any) -> None:
    calls = hub(RuntimeError("no download is expected"))
    assert fetch(str(tmp_path), None, False, None, weights=True) == tmp_path
    assert calls == []


def test_a_directory_wins_over_a_name(
    tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub(RuntimeError("no download is expected"))
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert fetch("org/name", None, False, None, weights=True) == Path("org/name")
    assert calls == []


def test_download(tmp_path: Path, hub: Any) -> None:
    calls = hub(tmp_path)
    assert fetch("org/name", "v1", False, "token", weights=True) == tmp_path
    (call,) = calls
    assert (call["repo_id"], call["revision"], call["token"]) == ("org/name", "v1", "token")
    assert call["local_files_only"] is False
    assert {"*.json", "*.safetensors"} <= set(call["allow_patterns"])
    assert not any(pattern.endswith((".bin", ".pt", ".pth")) for pattern in call["allow_patterns"])


def test_without_weights(tmp_path: Path, hub: Any) -> None:
    calls = hub(tmp_path)
    fetch("org/name", None, True, None, weights=False)
    assert calls[0]["local_files_only"] is True
    assert "*.safetensors" not in calls[0]["allow_patterns"]
    assert "*.json" in calls[0]["allow_patterns"]


@pytest.mark.parametrize("model", ["nowhere", "./org/name", "~/name", "/abs/name", "a/b/c", ""])
def test_what_cannot_be_a_name_is_a_missing_directory(model: str, hub: Any) -> None:
    calls = hub(RuntimeError("no download is expected"))
    with pytest.raises(ModelError, match="no such directory"):
        fetch(model, None, False, None, weights=True)
    assert calls == []


@pytest.mark.parametrize(
    ("error", "offline", "message"),
    [
        (errors.GatedRepoError("x", response=response(403)), False, "accept its terms.*HF_TOKEN"),
        (errors.RepositoryNotFoundError("x", response=response(404)), False, "HF_TOKEN"),
        (errors.RevisionNotFoundError("x", response=response(404)), False, "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), True, "--offline"),
        (errors.LocalEntryNotFoundError("x"), False, "cannot be reached"),
        (errors.HfHubHTTPError("status 500", response=response(500)), False, "failed: .*500"),
        (OSError("No space left on device"), False, "failed: .*No space left"),
        (httpx.ConnectError("connection refused"), False, "failed: .*connection refused"),
    ],
)
def test_refused_downloads_say_what_to_do(
    error: Exception, offline: bool, message: str, hub: Any
) -> None:
    hub(error)
    with pytest.raises(ModelError, match=message) as caught:
        fetch("org/name", "v9", offline, None, weights=True)
    assert "org/name" in str(caught.value)


@pytest.mark.parametrize(("load_format", "weights"), [("auto", True), ("dummy", False)])
def test_resolve_downloads_what_it_needs_with_the_token_of_the_environment(
    load_format: str,
    weights: bool,
    hub: Any,
    write_checkpoint: Any,
    capabilities: dict[str, BackendCapabilities],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    calls = hub(write_checkpoint())
    settings = ServeSettings(model="org/name", offline=True, load_format=load_format)
    model = resolve(settings, capabilities).model
    (call,) = calls
    assert (call["token"], call["local_files_only"]) == ("hf_x", True)
    assert ("*.safetensors" in call["allow_patterns"]) is weights
    assert model.served_model_names == ("org/name",)
