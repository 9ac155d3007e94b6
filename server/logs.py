"""Logging of every process: one line format, with the role (`launcher`, `http`, `rank 0`) in it."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s [{role}] %(message)s"


def setup_logging(role: str, level: str) -> None:
    """Set up this process's root logger on standard error; called again in each child."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT.format(role=role), "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "urllib3", "filelock", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
