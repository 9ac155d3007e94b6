"""Lines of the log, written by a thread of its own: where they cannot be written now, on a slow
disk or into a pipe that nobody reads, that holds nobody else up.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque

# Then lines are dropped, and it is said how many.
MAX_WAITING = 10_000
# What a process that ends gives its last lines.
FLUSH_S = 2.0


class LogWriter:
    """Writes to a descriptor, in order. Use from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_dropped = 0
        # May be taken again by a signal handler that logs.
        self._news = threading.Condition(threading.RLock())
        self._is_idle, self._is_stuck = True, False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: str) -> None:
        """It is dropped where too many wait."""
        with self._news:
            if len(self._lines) >= MAX_WAITING:
                self._num_dropped += 1
                return
            self._lines.append(line.encode(errors="backslashreplace") + b"\n")
            self._is_idle = False
            self._news.notify_all()

    def take_num_dropped(self) -> int:
        """Of lines since the last call, as soon as others are taken again."""
        with self._news:
            if not self._num_dropped or len(self._lines) >= MAX_WAITING:
                return 0
            num_dropped, self._num_dropped = self._num_dropped, 0
            return num_dropped

    def flush(self) -> None:
        """Wait until all is written, for `FLUSH_S` at most, and not again once that was in vain."""
        deadline = time.monotonic() + FLUSH_S
        with self._news:
            while not (self._is_idle or self._is_stuck):
                if not self._news.wait(max(0.0, deadline - time.monotonic())):
                    self._is_stuck = True

    def _run(self) -> None:
        while True:
            with self._news:
                if not self._lines:
                    self._is_idle = True
                    self._news.notify_all()
                while not self._lines:
                    self._news.wait()
                line = self._lines.popleft()
            # A disk that is full loses lines, and nothing else.
            with contextlib.suppress(OSError):
                # One call for a line, so that those of other processes come before or after it.
                while line := line[os.write(self._descriptor, line) :]:
                    pass


class LineHandler(logging.Handler):
    """Hands its lines to a writer, which others may share."""

    def __init__(self, writer: LogWriter, tells_of_dropped: bool) -> None:
        super().__init__()
        self._writer = writer
        self._tells_of_dropped = tells_of_dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._tells_of_dropped and (num_dropped := self._writer.take_num_dropped()):
                words = "%d lines of the log were dropped here: it could not be written"
                told = (__name__, logging.WARNING, __file__, 0, words, (num_dropped,), None)
                self._writer.put(self.format(logging.LogRecord(*told)))
            self._writer.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._writer.flush()
