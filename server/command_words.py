"""How the commands that read their own words do it: `moed place`, `bench`, `healthcheck`."""

import argparse
from typing import Any, NoReturn

from moed.config.errors import UsageError
from moed.config.names import flags
from moed.config.other_commands import belongs_to


class CommandParser(argparse.ArgumentParser):
    """A command line that cannot be read is a `UsageError`, in one sentence."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"moed {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A flag that another command takes is told where it belongs."""
        given, left = self.parse_known_args(args, namespace)
        if left:
            self.error(hint_for(left[0]) or f"unrecognized arguments: {' '.join(left)}")
        return given

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` shows how)")


def hint_for(word: str) -> str | None:
    """Which command takes the flag `word`; None where none does."""
    flag = word.partition("=")[0]
    return f"{flag} belongs to `moed serve`" if flag in flags() else belongs_to(flag)
