"""Who may adopt a front end: a process of the same user and the same torchrun, and nobody else."""

import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moed.server.succession import Succession, find_predecessor, is_possible

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

FIND = (
    "import sys; from moed.server.succession import find_predecessor; "
    "found = find_predecessor(int(sys.argv[1])); "
    "print(found and found[0].recv_bytes(), found and found[1])"
)


@pytest.fixture
def agent() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for torchrun."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def accept(front_end: Succession, timeout_s: float = 20.0) -> object:
    assert select.select([front_end.listener], [], [], timeout_s)[0], "nobody came"
    return front_end.accept()


def test_a_child_of_the_same_torchrun_is_let_in() -> None:
    front_end = Succession(os.getpid())  # this process stands for torchrun
    with front_end.listener:
        child = subprocess.Popen(
            [sys.executable, "-c", FIND, str(os.getpid())], stdout=subprocess.PIPE, text=True
        )
        pipe = accept(front_end)
        assert pipe is not None
        pipe.send_bytes(b"here")  # type: ignore[attr-defined]
        said, _ = child.communicate(timeout=20)
        assert said.split() == ["b'here'", str(os.getpid())]


def test_another_process_gets_nothing(agent: "subprocess.Popen[bytes]") -> None:
    """This one is no child of the agent."""
    front_end = Succession(agent.pid)
    with front_end.listener:
        found = find_predecessor(agent.pid)
        assert found is not None
        assert accept(front_end) is None
        with pytest.raises((EOFError, ConnectionResetError)):
            found[0].recv_bytes()


def test_one_that_left_again_is_no_error(agent: "subprocess.Popen[bytes]") -> None:
    front_end = Succession(agent.pid)
    with front_end.listener:
        found = find_predecessor(agent.pid)
        assert found is not None
        found[0].close()
        assert accept(front_end) is None


def test_without_a_front_end_there_is_none_to_adopt(agent: "subprocess.Popen[bytes]") -> None:
    assert find_predecessor(agent.pid) is None


def test_the_end_of_torchrun_is_seen(agent: "subprocess.Popen[bytes]") -> None:
    front_end = Succession(agent.pid)
    with front_end.listener:
        assert not select.select([front_end.agent_fd], [], [], 0)[0]
        agent.kill()
        started = time.monotonic()
        assert select.select([front_end.agent_fd], [], [], 20)[0]
        assert time.monotonic() - started < 20


def test_a_torchrun_that_is_gone_is_an_error(agent: "subprocess.Popen[bytes]") -> None:
    agent.kill()
    agent.wait(20)
    with pytest.raises(ProcessLookupError):
        Succession(agent.pid)


def test_where_it_is_not_possible_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_possible()

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not is_possible()
    assert "no pidfd_open or no /proc (Function not implemented)" in caplog.text
