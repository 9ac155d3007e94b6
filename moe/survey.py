"""Going over a checkpoint before anything is read."""

import logging
import math
from collections.abc import Sequence

import torch

from moed.config.errors import ModelError
from moed.config.sizes import format_bytes
from moed.moe.block_scaled import SCALE_BLOCK, BlockScaled
from moed.moe.loader import DERIVED_SUFFIX, Checkpoint, first_names

logger = logging.getLogger(__name__)


class Survey:
    """A `Source` without contents: names all that does not fit at once, and adds up bytes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.device = torch.device("meta")
        self._checkpoint = checkpoint
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._known: set[str] = set()
        self._asked: set[str] = set()
        self._stored_as: set[str] = set()
        self.stored_bytes = 0
        """Of what this rank reads, in the files."""
        self.loaded_bytes = 0
        """Of the same in memory."""

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape_of(name)

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor without storage."""
        return self._read(name, shape, tuple(shape))

    def get_float32(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """As `shape`, but for dims of 1. It must be stored plain."""
        wanted = found = tuple(shape)
        if not self._checkpoint.is_plain(name):
            self._known |= self._checkpoint.names_of(name)
            self._wrong.append(f"{name} is quantised, and served in plain numbers only")
            return torch.empty(wanted, device=self.device)
        if self._checkpoint.has(name):
            stored = self._checkpoint.shape_of(name)
            # Else the mismatch is told as any other.
            found = stored if _without_ones(stored) == _without_ones(wanted) else wanted
        before = self.loaded_bytes
        self._read(name, found, found)
        self.loaded_bytes = before + math.prod(wanted) * torch.float32.itemsize
        return torch.empty(wanted, device=self.device)

    def get_row(self, name: str, shape: Sequence[int], row: int) -> torch.Tensor:
        return self._read(name, shape, tuple(shape[1:]))

    def is_plain(self, name: str) -> bool:
        return self._checkpoint.is_plain(name)

    def is_fp8(self, name: str) -> bool:
        return self._checkpoint.is_fp8(name)

    def get_fp8(self, name: str, shape: Sequence[int]) -> BlockScaled:
        """Without storage; its bytes count as they are stored."""
        if name not in self._asked:
            before = self.loaded_bytes
            self._read(name, shape, tuple(shape))
            self.loaded_bytes = before + self._checkpoint.stored_bytes(name, shape)
        blocks = (math.ceil(size / SCALE_BLOCK) for size in shape)
        return BlockScaled(
            torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=self.device),
            torch.empty(tuple(blocks), device=self.device),
        )

    def _read(self, name: str, shape: Sequence[int], wanted: tuple[int, ...]) -> torch.Tensor:
        """`wanted`: the shape of what is read of the weight `name` of `shape`."""
        if name not in self._asked:
            self._asked.add(name)
            self._known |= self._checkpoint.names_of(name)
            if not self._checkpoint.has(name):
                self._missing.append(name)
            elif problem := self._checkpoint.problem(name, shape):
                self._wrong.append(problem)
        if not self._missing and not self._wrong:
            self._count(name, shape, math.prod(wanted))
        return torch.empty(wanted, device=self.device)

    def _count(self, name: str, shape: Sequence[int], num_wanted: int) -> None:
        stored_bytes = self._checkpoint.stored_bytes(name, shape)
        self.stored_bytes += stored_bytes * num_wanted // max(math.prod(shape), 1)
        self.loaded_bytes += num_wanted * self._checkpoint.dtype.itemsize
        if stored_as := self._checkpoint.quantized_as(name):
            self._stored_as.add(stored_as.label)

    def skip(self, name: str) -> None:
        self._known |= self._checkpoint.names_of(name)

    def skip_below(self, prefix: str) -> None:
        """Told once, since a part of the checkpoint stays unused."""
        found = {name for name in self._checkpoint.names if name.startswith(prefix)}
        if found:
            self._known |= found
            logger.info("%d tensors below %s are not used", len(found), prefix)

    def finish(self) -> None:
        """Raises `ModelError` naming missing, misshapen and unused tensors."""
        unused = sorted(
            name
            for name in self._checkpoint.names - self._known
            if not name.endswith(DERIVED_SUFFIX)
        )
        problems = [
            f"{what} {first_names(names)}"
            for what, names in (
                ("tensors are missing:", self._missing),
                ("tensors do not fit:", self._wrong),
                ("tensors are not used by the model that config.json describes:", unused),
            )
            if names
        ]
        if problems:
            raise ModelError(f"{self._checkpoint.folder}: " + "; ".join(problems))

    def summary(self) -> str | None:
        """One line on weights that are converted as they are loaded; None where none are."""
        if not self._stored_as:
            return None
        dtype = str(self._checkpoint.dtype).removeprefix("torch.")
        return (
            f"the checkpoint is quantised ({', '.join(sorted(self._stored_as))}) and converted to "
            f"{dtype} as it is loaded: {format_bytes(self.stored_bytes)} in its files become "
            f"{format_bytes(self.loaded_bytes)} of memory on each rank"
        )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
