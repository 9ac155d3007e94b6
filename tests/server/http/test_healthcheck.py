"""`moed healthcheck` against a front end, against others, and against nobody."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moed.config.errors import ConfigError, UsageError
from moed.server.healthcheck import healthcheck, own_target, target_of
from moed.server.messages import RankLost
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Somebody who takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_follows_the_daemon_through_its_life(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served(frontend_config(checkpoint), ready=False) as served:
        monkeypatch.setenv("MOED_PORT", str(served.port))
        monkeypatch.setenv("MOED_HOST", "0.0.0.0")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        served.wait(lambda: served.get("/livez").status_code == 200)
        assert healthcheck([]) == 1
        assert "loading" in capsys.readouterr().out
        assert healthcheck(["--probe", "started"]) == 1
        assert healthcheck(["--probe", "live"]) == 0
        served.make_ready()
        capsys.readouterr()
        assert healthcheck([]) == healthcheck([served.url]) == 0
        assert capsys.readouterr().out == "ready\n" * 2
        served.tell(RankLost(rank=1, error="rank 1 was killed"))
        served.wait(lambda: served.get("/readyz").status_code == 503)
        assert healthcheck([]) == 1
        assert capsys.readouterr().out == "failed: rank 1 was killed\n"
        assert healthcheck(["--probe", "live"]) == 0


def test_nobody_there(silent_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        free = found.getsockname()[1]
    assert healthcheck([f"http://127.0.0.1:{free}"]) == 1
    assert "no answer" in capsys.readouterr().out
    started = time.monotonic()
    assert healthcheck([f"http://127.0.0.1:{silent_port}", "--timeout", "0.2"]) == 1
    assert time.monotonic() - started < 2
    assert "timed out" in capsys.readouterr().out


def test_somebody_else_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        thread = threading.Thread(target=answer)
        thread.start()
        assert healthcheck([f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join(5)
    assert "not a daemon of moed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.1:81/v1", ("10.0.0.1", 81, False)),
        ("https://[::1]", ("::1", 443, True)),
    ],
)
def test_url(url: str, expected: tuple[str, int, bool]) -> None:
    target = target_of(url)
    assert (target.host, target.port, target.is_encrypted) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["127.0.0.1:8000"],
        ["ftp://x"],
        ["http://x:port"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--probe", "x"],
    ],
)
def test_a_users_fault_is_a_sentence(words: list[str]) -> None:
    with pytest.raises(UsageError, match="moed healthcheck"):
        healthcheck(words)


def test_a_port_that_nobody_knows_and_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOED_PORT", "0")
    with pytest.raises(UsageError, match="give the daemon's URL"):
        own_target()
    monkeypatch.setenv("MOED_PORT", "http")
    with pytest.raises(ConfigError, match="MOED_PORT"):
        own_target()
