"""Logging of every process: one line format, with the role (`launcher`, `http`, `rank 0`) in it."""

import datetime
import json
import logging
import sys

from moed.server.log_writer import LineHandler, LogWriter

FORMAT = "%(asctime)s %(levelname)-7s [{role}] %(message)s"


# Its records are whole JSON lines, whatever the format of the others.
REQUEST_LOGGER = "moed.requests"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup_logging(role: str, level: str, log_format: str) -> None:
    """Set up this process's root logger on standard error; called again in each child."""
    writer = LogWriter(sys.stderr.fileno())
    handler = LineHandler(writer, tells_of_dropped=True)
    text = logging.Formatter(FORMAT.format(role=role), "%H:%M:%S")
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else text)
    plain = LineHandler(writer, tells_of_dropped=False)
    plain.setFormatter(logging.Formatter("%(message)s"))
    requests = logging.getLogger(REQUEST_LOGGER)
    requests.handlers[:] = [plain]
    requests.propagate = False
    # They have been asked for.
    requests.setLevel(logging.INFO)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "urllib3", "filelock", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
