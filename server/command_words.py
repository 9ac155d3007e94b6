"""How the commands that read their own words do it: `moed place`, `bench`, `healthcheck`."""

import argparse
from typing import NoReturn

from moed.config.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """A command line that cannot be read is a `UsageError`, in one sentence."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"moed {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` shows how)")
