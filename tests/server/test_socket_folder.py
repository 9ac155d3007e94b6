"""The folder of the sockets: one a launch, gone at its end, or with the next start."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from moed.config.errors import ConfigError
from moed.server.socket_folder import socket_folder

WAITS_TO_BE_KILLED = """
import time
from moed.server.socket_folder import socket_folder
with socket_folder() as folder:
    (folder / "engines-0").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_this_user_enters_it_and_nothing_stays(temporary: pathlib.Path) -> None:
    with socket_folder() as one, socket_folder() as two:
        assert one != two and one.parent == two.parent == temporary
        assert one.stat().st_mode & 0o777 == 0o700
    assert not list(temporary.iterdir())


def test_what_a_killed_launcher_left_goes_with_the_next_start(temporary: pathlib.Path) -> None:
    command = [sys.executable, "-c", WAITS_TO_BE_KILLED]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            left = pathlib.Path(process.stdout.readline().strip())
            with socket_folder():
                # Its launcher still runs.
                assert (left / "engines-0").exists()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    assert left.exists()
    with socket_folder() as own:
        assert list(temporary.iterdir()) == [own]


def test_folders_of_others_are_left_alone(temporary: pathlib.Path) -> None:
    (temporary / "moed-being-made").mkdir()
    (temporary / "moed-file").touch()
    (temporary / "other").mkdir()
    with socket_folder():
        pass
    assert {path.name for path in temporary.iterdir()} == {"moed-being-made", "moed-file", "other"}


def test_no_room_for_the_path_of_a_socket(
    temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="107 bytes; set TMPDIR"), socket_folder():
        pass
    assert not list(deep.iterdir())


def test_no_folder_at_all(temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "none"))
    with pytest.raises(ConfigError, match="none: No such file or directory; set TMPDIR"):
        socket_folder().__enter__()
