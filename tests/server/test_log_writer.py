"""The log holds nobody up, keeps its order, and says what it had to leave out."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from moed.server import log_writer
from moed.server.log_writer import LineHandler, LogWriter

F_SETPIPE_SZ = 1031
SMALL = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Of which little fits."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, SMALL)
    yield reading, writing
    # Frees the writer's thread, which ends with this process.
    for end in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(end)


def logger_to(writer: LogWriter) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(LineHandler(writer, tells_of_dropped=True))
    return logger


def read_until(reading: int, end: str) -> list[str]:
    os.set_blocking(reading, False)
    deadline, text = time.monotonic() + 20, ""
    while not text.endswith(f"{end}\n"):
        assert time.monotonic() < deadline, text[-200:]
        with contextlib.suppress(BlockingIOError):
            text += os.read(reading, 65536).decode()
        time.sleep(0.001)
    return text.splitlines()


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    logger = logger_to(LogWriter(writing))
    expected = [f"{number} {'é' * number}" for number in range(500)]
    for line in expected:
        logger.info(line)
    # A lone surrogate cannot be written as it is.
    logger.info("last \udcff")
    assert read_until(reading, "last \\udcff")[:-1] == expected


def test_a_reader_that_does_not_read_holds_nobody_up(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MAX_WAITING", 100)
    monkeypatch.setattr(log_writer, "FLUSH_S", 0.2)
    reading, writing = pipe
    writer = LogWriter(writing)
    logger = logger_to(writer)
    for number in range(2000):
        logger.info("line %d %s", number, "x" * 100)
    # In vain, and not for long.
    writer.flush()
    writer.flush()
    assert writer._is_stuck and len(writer._lines) <= 101
    reader = threading.Thread(target=lambda: lines.extend(read_until(reading, "it goes on")))
    lines: list[str] = []
    reader.start()
    deadline = time.monotonic() + 20
    while writer._lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    logger.info("it goes on")
    reader.join(20)
    told = [line for line in lines if "lines of the log were dropped here" in line]
    # Every line was written, or counted.
    assert told and len(lines) - len(told) + sum(int(t.split()[0]) for t in told) == 2001


def test_a_descriptor_that_takes_nothing_loses_lines_alone() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        writer = LogWriter(full)
        logger_to(writer).info("lost")
        writer.flush()
        assert writer._is_idle and not writer._is_stuck
    finally:
        os.close(full)
