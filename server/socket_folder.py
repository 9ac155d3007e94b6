"""The folder of the sockets on which the processes of one node talk: this user alone can enter it.

A launcher that is killed cannot remove its folder. The next start does: whose launcher still runs
is known by a lock, which the kernel takes back from a process that ends in any way.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moed.config.errors import ConfigError

PREFIX = "moed-"
LOCK = "lock"
# What the kernel takes as a socket's path, less the longest name in the folder.
MAX_LENGTH = 107 - len("/engines-1000000000")


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Removed at the end. Raises `ConfigError` where there can be none."""
    parent = _temporary_folder()
    _remove_leftovers(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"no folder for the sockets of this launch can be made in {parent}: {error.strerror}; "
            "set TMPDIR to one that can be written"
        ) from None
    try:
        if len(os.fsencode(folder)) > MAX_LENGTH:
            raise ConfigError(
                f"{parent}, where temporary files go, is too long for the path of a socket, which "
                "may have 107 bytes; set TMPDIR to a shorter one, such as /tmp"
            )
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise ConfigError(
            f"there is no folder for the sockets of this launch: {error.strerror}; set TMPDIR to "
            "one that can be written"
        ) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Before it has its name, so that nobody finds it free."""
    with open(folder / "new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / "new", folder / LOCK)
        yield


def _remove_leftovers(parent: Path) -> None:
    """Of launches of this user that have ended without a chance to clean up."""
    for folder in parent.glob(f"{PREFIX}*"):
        # Another's, one that is being made, or no folder at all.
        with contextlib.suppress(OSError), open(folder / LOCK) as lock:
            if os.fstat(lock.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
